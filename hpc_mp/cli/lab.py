"""``hpc-mp lab``: a Slurm cluster of several hosts on this machine, to try launches on: its life cycle and its faults."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.table import Table

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.cluster.bad_nodes import ledger
from hpc_mp.cluster.bandwidth import where
from hpc_mp.lab import keeper, why_not
from hpc_mp.lab.cluster import LabCluster, LabError
from hpc_mp.lab.lab import Lab, installed_release, spread
from hpc_mp.lab.view import HostView, host_views, written

RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?bit)")
OFF = "off"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
RANK_MB = 400  # of real memory, at least, that a rank of the smallest model takes on CPU
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"

name_option = click.option("--name", help="Of the cluster, where several are up.")


@click.group(help="Have a Slurm cluster of several hosts on this machine: up, look at it, spoil its network and nodes, down. "
                  "Real daemons, hosts with networks of their own, switches and cables. Needs root and Linux.")
def command() -> None:
    pass


@command.command(help="Start a Slurm cluster of several hosts on this machine, to try launches on: real daemons, hosts with "
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
                         f"use it with `export SLURM_CONF={lab.conf}`, or end it with `{mine('lab', 'down', *_named(name))}`")
    forget(chosen(name))
    _say(lab, name, time.monotonic() - start, as_json)
    _warn(nodes)


@command.command(help="End a cluster that `up` started, and whatever runs on it; nothing is left.")
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


@command.command(help="Show the nodes of the cluster that `up` started: Slurm's state, switch, cable, rate.")
@name_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(name: str | None, as_json: bool) -> None:
    cluster = chosen(name)
    nodes = host_views(cluster)
    if as_json:
        click.echo(json.dumps({
            "name": cluster.directory.name.removeprefix("hpc-mp-"), "slurm_conf": str(cluster.conf),
            "nodes": [asdict(node) for node in nodes],
        }))
        return
    table = Table("node", "switch", "address", "state", "cable", "rate", box=None, padding=(0, 2, 0, 0))
    for node in nodes:
        table.add_row(node.name, node.switch, node.address, node.state or "Slurm does not answer", *_cable(node))
    Console(highlight=False, emoji=False).print(table)
    click.echo(f"\nexport SLURM_CONF={cluster.conf}")


@command.command(help="Limit what nodes (all, unless named) send and receive, each way: 200mbit, 1gbit; off takes the limit "
                      "away.")
@click.argument("rate")
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@name_option
def shape(rate: str, nodes: tuple[str, ...], name: str | None) -> None:
    written = rate.lower()
    match = RATE.fullmatch(written)
    if written != OFF and (match is None or not float(match[1])):
        raise HpcMpError(f"rate {rate}", "must be a number above 0 with bit, kbit, mbit or gbit (per second)",
                         "write for example 200mbit, or off for no limit")
    cluster = _root(name, nodes)
    with _said(f"rate {rate}", "write one that tc takes, such as 200mbit"):
        if written == OFF:
            cluster.unshape(nodes)
        else:
            cluster.shape(written, nodes)


@command.command(help="Pull a node's cable, or put it back.")
@click.argument("node")
@click.argument("state", type=click.Choice(["up", "down"]))
@name_option
def link(node: str, state: str, name: str | None) -> None:
    _root(name, [node]).link(node, state == "up")


@command.command(help="End all processes of a node at once, as a power cut does. Slurm calls it down some 10 s later.")
@click.argument("node")
@name_option
def kill(node: str, name: str | None) -> None:
    cluster = _root(name, [node])
    if not cluster.runs(node):
        raise HpcMpError(f"node {node}", "is off already", f"start it with `{_typed('boot', name, node)}`")
    cluster.kill(node)


@command.command(help="Start a node that was killed.")
@click.argument("node")
@name_option
def boot(node: str, name: str | None) -> None:
    cluster = _root(name, [node])
    if cluster.runs(node):
        raise HpcMpError(f"node {node}", "is on", f"only a node that was killed can be booted: `{_typed('kill', name, node)}`")
    cluster.boot(node)


@command.command(help="Run a command inside a node, as root: hpc-mp lab at n2 ip address",
               context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@name_option
@click.argument("node")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def at(name: str | None, node: str, command: tuple[str, ...]) -> None:
    cluster = _root(name, [node])
    if not cluster.runs(node):
        raise HpcMpError(f"node {node}", "is off", f"start it with `{_typed('boot', name, node)}`")
    raise click.exceptions.Exit(subprocess.run([*cluster.inside(node), *command], env=cluster.environ).returncode)


def forget(cluster: LabCluster) -> None:
    """Remove the records of an earlier cluster of this name, of root and of the user who called sudo: bad nodes, rates."""
    user = os.environ.get("SUDO_USER")
    environs = [os.environ, *([{"XDG_STATE_HOME": str(Path(f"~{user}").expanduser() / ".local" / "state")}] if user else [])]
    for environ in environs:
        for record in (ledger(f"lab{cluster.number}", environ), where(f"lab{cluster.number}", environ)):
            with suppress(OSError):
                record.unlink(missing_ok=True)


def chosen(name: str | None) -> LabCluster:
    """Return the cluster of that name, else that of SLURM_CONF, else the only one."""
    running = keeper.names()
    ours = Path(os.environ.get("SLURM_CONF", "")).resolve()
    name = name or next((up for up in running if ours == keeper.directory_of(up) / "etc" / "slurm.conf"), None)
    if name is None and len(running) > 1:
        raise HpcMpError("hpc-mp lab", f"{len(running)} clusters are up: {', '.join(running)}", "say which with --name")
    if not running or name not in (None, *running):
        value = "hpc-mp lab" if name is None else f"--name {name}"
        others = f"up: {', '.join(running)}; or s" if running else "s"
        raise HpcMpError(value, "no such cluster is up" if name else "no cluster is up",
                         f"{others}tart one: `{mine('lab', 'up', *(('--name', name) if name else ()))}`")
    return LabCluster(keeper.directory_of(name or running[0]))


def need_root() -> None:
    """Raise HpcMpError, unless run by root, with the whole command for sudo, which uses its own search path."""
    if os.geteuid() != 0:
        raise HpcMpError("hpc-mp lab", "makes namespaces and network interfaces, and only root may touch them",
                         f"type `{mine(*sys.argv[1:])}`")
    os.environ["PATH"] = f"{os.environ.get('PATH', '/usr/bin:/bin')}:{SBIN}"  # a plain `su` brings a PATH without daemons


def mine(*arguments: str) -> str:
    """Return a command of this hpc-mp to type, with its full path, through sudo."""
    program = os.path.abspath(sys.argv[0])
    start = [sys.executable, "-m", "hpc_mp"] if program.endswith("__main__.py") else [program]
    return shlex.join(["sudo", *start, *arguments])


def _named(name: str | None) -> tuple[str, ...]:
    """Return the option for a cluster without the default name."""
    return ("--name", name) if name not in (None, "lab") else ()


def _typed(verb: str, name: str | None, node: str) -> str:
    """Return a command for a node of the cluster given to this command, as root types it."""
    return shlex.join(["hpc-mp", "lab", verb, *_named(name), node])


def _root(name: str | None, nodes: Sequence[str]) -> LabCluster:
    """Return the cluster, for root, and check that it has these nodes."""
    need_root()
    cluster = chosen(name)
    for node in nodes:
        if node not in cluster.nodes:
            raise HpcMpError(f"node {node}", f"is none of {', '.join(cluster.nodes)}", "name one of these")
    return cluster


@contextmanager
def _said(value: str, remedy: str) -> Iterator[None]:
    """Turn a refusal by a system program into an HpcMpError with the program's message."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.split())
        raise HpcMpError(value, f"was refused: {reason}", remedy) from None


def _cable(node: HostView) -> tuple[str, str]:
    if node.cable is None:
        return "(root sees it)", "(root sees it)"
    return "up" if node.cable.up else "down", written(node.cable.rate) if node.cable.rate else "no limit"


def _refuse(accounting: bool) -> None:
    """Raise HpcMpError if this machine cannot run a cluster."""
    if sys.platform != "linux":
        raise HpcMpError("hpc-mp lab up", "needs namespaces of Linux, and this is no Linux",
                         "use a virtual machine with Debian or Ubuntu")
    need_root()
    packages = why_not.missing(why_not.PACKAGES | (why_not.ACCOUNTING if accounting else {}))
    if packages:
        raise HpcMpError(
            "hpc-mp lab up", f"programs are missing, of Debian's and Ubuntu's packages {', '.join(packages)}",
            f"install them: `apt-get install --no-install-recommends {' '.join(packages)}`. They bring daemons, which are not "
            "used; where systemd runs, `systemctl mask munge slurmctld slurmd slurmdbd` before that keeps them from starting")
    refusal = why_not.refused()
    if refusal:
        raise HpcMpError(
            "hpc-mp lab up", f"needs namespaces, bridges and shaped cables, which this machine refuses ({refusal})",
            "in a container: start it with --privileged; else: use a kernel that has bridge, veth and sch_tbf")


def _shown(show: Sequence[Path]) -> tuple[Path, ...]:
    """Return the directories below /tmp that the nodes see: the user's, this directory, and hpc-mp's installation, top down."""
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
        shared = f" but {' '.join(map(str, lab.keep))}, which all see" if lab.keep else ""
        click.echo(f"Nodes see the files of this machine. Each has a /tmp of its own{shared}.\n"
                   f"It runs until `{mine('lab', 'down', *_named(name))}`. Also: status, shape, link, kill, boot, at.")
    else:
        click.echo(export)


def _warn(nodes: int) -> None:
    free = psutil.virtual_memory().available >> 20
    if free < nodes * RANK_MB:
        click.echo(f"note: {free} MB of memory are free; a rank on each of {nodes} nodes takes {nodes * RANK_MB} MB or more",
                   err=True)
    if nodes > 4 * (os.cpu_count() or 1):
        click.echo(f"note: {nodes} nodes share {os.cpu_count()} cores; ranks will wait for each other", err=True)
