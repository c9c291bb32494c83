"""``hpc-mp cluster up`` and ``down``: a cluster on a laptop."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import psutil
from rich.console import Console

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.cli.lab_which import chosen, mine, name_option, need_root
from hpc_mp.lab import keeper, why_not
from hpc_mp.lab.cluster import LabError
from hpc_mp.lab.lab import Lab, installed_release, spread

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
RANK_MB = 400  # of real memory, at least, that a rank of the smallest model takes on CPU


@click.command(help="Start a Slurm cluster of several hosts on this machine, to try launches on: real daemons, hosts with "
                    "networks of their own, switches and cables. It runs in the background until `down`. Needs root and Linux.")
@click.option("--nodes", default=4, show_default=True, type=click.IntRange(1, 16), help="Hosts n1 … nN.")
@click.option("--cpus-per-node", default=4, show_default=True, type=click.IntRange(1, 64),
              help="CPUs that Slurm believes each to have.")
@click.option("--memory-per-node", default=4000, show_default=True, type=click.IntRange(256, 1_000_000), metavar="MB",
              help="Memory that Slurm believes each to have.")
@click.option("--switches", type=click.IntRange(1, 16), metavar="N", help="Leaf switches below the spine.  [default: 2]")
@click.option("--accounting", is_flag=True, help="With slurmdbd and a database, for sacct; the account is acc.")
@click.option("--show", type=click.Path(exists=True, file_okay=False, path_type=Path), multiple=True, metavar="DIRECTORY",
              help="Below /tmp, of which each node has its own: what the nodes see too, besides the directory you are in.")
@click.option("--name", default="lab", show_default=True, help="Of the cluster, where you want several.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def up(nodes: int, cpus_per_node: int, memory_per_node: int, switches: int | None, accounting: bool,
       show: tuple[Path, ...], name: str, as_json: bool) -> None:
    start = time.monotonic()
    if not NAME.fullmatch(name):
        raise HpcMpError(f"--name {name}", "must be small letters, digits and hyphens, 31 at most", "write --name second")
    if switches is not None and switches > nodes:
        raise HpcMpError(f"--switches {switches}", f"there are only {nodes} nodes to put under them", f"give at most {nodes}")
    _refuse(accounting)
    directory = keeper.directory_of(name)
    lab = Lab(
        directory,
        spread(nodes, switches or min(nodes, 2)),
        node=f"CPUs={cpus_per_node} RealMemory={memory_per_node}",
        accounting=accounting,
        users=tuple(dict.fromkeys(("root", os.environ.get("SUDO_USER") or "root"))),
        overrides={"DefMemPerCPU": str(min(500, memory_per_node // cpus_per_node))},
        keep=_shown(show),
        cores=sorted(os.sched_getaffinity(0)),
    )
    console = Console(stderr=True)
    try:
        with console.status("starting") as status:
            started = keeper.start(lab, lambda what: status.update(f"starting: {what}"))
    except LabError as error:
        raise RunFailed(f"the cluster did not start, and nothing of it is left: {error}") from None
    if not started:
        raise HpcMpError(f"cluster {name}", "is up already",
                         f"use it with `export SLURM_CONF={lab.conf}`, or end it with `{mine('cluster', 'down')}`")
    _say(lab, name, time.monotonic() - start, as_json)
    _warn(nodes)


@click.command(help="End a cluster that `up` started, and whatever runs on it; nothing is left.")
@name_option
def down(name: str | None) -> None:
    need_root()
    cluster = chosen(name)
    try:
        keeper.stop(cluster.directory)
    except LabError as error:
        raise RunFailed(f"the cluster did not end: {error}") from None
    if sys.stdout.isatty():
        click.echo("nothing is left of it; unset SLURM_CONF in the shells that have it")


def _refuse(accounting: bool) -> None:
    """HpcMpError where no cluster can be."""
    if sys.platform != "linux":
        raise HpcMpError("hpc-mp cluster up", "needs namespaces of Linux, and this is no Linux",
                         "use a virtual machine with Debian or Ubuntu")
    need_root()
    packages = why_not.missing(why_not.PACKAGES | (why_not.ACCOUNTING if accounting else {}))
    if packages:
        raise HpcMpError(
            "hpc-mp cluster up", f"programs are missing, of Debian's and Ubuntu's packages {', '.join(packages)}",
            f"install them: `apt-get install --no-install-recommends {' '.join(packages)}`. They bring daemons, which are not "
            "used; where systemd runs, `systemctl mask munge slurmctld slurmd slurmdbd` before that keeps them from starting")
    words = why_not.refused()
    if words:
        raise HpcMpError(
            "hpc-mp cluster up", f"needs namespaces, bridges and shaped cables, which this machine refuses ({words})",
            "in a container: start it with --privileged; else: use a kernel that has bridge, veth and sch_tbf")


def _shown(show: Sequence[Path]) -> tuple[Path, ...]:
    """What the nodes see below /tmp: what the user named, this directory, and what hpc-mp runs from, from the top down."""
    paths = (*show, Path.cwd(), Path(__file__).parents[2], Path(sys.prefix), Path(sys.base_prefix))
    whole = [Path(*path.resolve().parts[:3]) for path in paths]
    return tuple(path for path in dict.fromkeys(whole) if path.parts[:2] == ("/", "tmp") and len(path.parts) == 3)


def _say(lab: Lab, name: str, seconds: float, as_json: bool) -> None:
    export = f"export SLURM_CONF={lab.conf}"
    if as_json:
        click.echo(json.dumps({
            "name": name, "directory": str(lab.directory), "slurm_conf": str(lab.conf), "nodes": list(lab.nodes),
            "switches": [list(leaf) for leaf in lab.leaves], "shown_below_tmp": [str(path) for path in lab.keep],
            "seconds": seconds,
        }))
    elif sys.stdout.isatty():
        release = ".".join(f"{part:02d}" for part in installed_release())
        click.echo(f"Slurm {release} with {len(lab.nodes)} idle nodes, after {seconds:.1f} s. As any user of this machine:\n\n"
                   f"    {export}\n    hpc-mp init\n    hpc-mp launch job.toml --on slurm --wait\n")
        seen = f" but {' '.join(map(str, lab.keep))}, which all see" if lab.keep else ""
        click.echo(f"Nodes see the files of this machine. Each has a /tmp of its own{seen}.\n"
                   f"It runs until `{mine('cluster', 'down')}`. Also: status, shape, link, kill, boot, at.")
    else:
        click.echo(export)


def _warn(nodes: int) -> None:
    free = psutil.virtual_memory().available >> 20
    if free < nodes * RANK_MB:
        click.echo(f"note: {free} MB of memory are free; a rank on each of {nodes} nodes takes {nodes * RANK_MB} MB or more",
                   err=True)
    if nodes > 4 * (os.cpu_count() or 1):
        click.echo(f"note: {nodes} nodes share {os.cpu_count()} cores; ranks will wait for each other", err=True)


