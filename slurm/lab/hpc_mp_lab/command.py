"""``hpc-mp lab``: a Slurm cluster of several hosts on this machine, for test launches: its life cycle and its faults."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.table import Table

import hpc_mp
from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.cluster.bad_nodes import ledger
from hpc_mp.cluster.bandwidth import where
from hpc_mp_lab import keeper
from hpc_mp_lab.cluster import LabCluster, LabError
from hpc_mp_lab.lab import Lab, installed_release, spread
from hpc_mp_lab.view import ACCOUNTING, PACKAGES, HostView, host_views, missing, refused, written

RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?bit)")
OFF = "off"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
RANK_MB = 400  # minimum of real memory for a rank of the smallest model on CPU
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
STARTED = """\
Slurm {release} with {nodes} idle nodes, after {seconds:.1f} s. As any user of this machine:

    export SLURM_CONF={conf}
    hpc-mp init
    hpc-mp launch job.toml --on slurm --wait

Nodes see the files of this machine, but each has its own /tmp{shared}.
The cluster runs until `{down}`. Also: status, shape, link, kill, boot, at."""

name_option = click.option("--name", help="Name of the cluster, if several are up.")


@click.group(help="Run a Slurm cluster of several hosts on this machine: start it, inspect it, break its network and nodes, end "
                  "it. It has real daemons, and hosts with separate networks, switches and cables. Needs root and Linux.")
def command() -> None:
    pass


@command.command(help="Start a Slurm cluster of several hosts on this machine, for test launches: real daemons, and hosts with "
                    "separate networks, switches and cables. It runs in the background until `down`. Needs root and Linux.")
@click.option("--nodes", default=4, show_default=True, type=click.IntRange(1, 16), help="Hosts n1 … nN.")
@click.option("--cpus-per-node", default=4, show_default=True, type=click.IntRange(1, 64),
              help="CPUs of each node in Slurm's configuration.")
@click.option("--memory-per-node", default=4000, show_default=True, type=click.IntRange(256, 1_000_000), metavar="MB",
              help="Memory of each node in Slurm's configuration.")
@click.option("--switches", type=click.IntRange(1, 16), metavar="N", help="Leaf switches below the spine.  [default: 2]")
@click.option("--accounting", is_flag=True, help="With slurmdbd and a database, for sacct; the account is acc.")
@click.option("--show", type=click.Path(exists=True, file_okay=False, path_type=Path), multiple=True, metavar="DIRECTORY",
              help="A directory below /tmp to share with the nodes, in addition to the current one; else each has its own /tmp.")
@click.option("--name", default="lab", show_default=True, help="Name of the cluster, for several clusters.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def up(nodes: int, cpus_per_node: int, memory_per_node: int, switches: int | None, accounting: bool,
       show: tuple[Path, ...], name: str, as_json: bool) -> None:
    start = time.monotonic()
    if not NAME.fullmatch(name):
        raise HpcMpError(f"--name {name}", "must be at most 31 lower-case letters, digits and hyphens", "write --name second")
    if switches is not None and switches > nodes:
        raise HpcMpError(f"--switches {switches}", f"must be at most --nodes, {nodes}", f"write --switches {nodes} or less")
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
        raise RunFailed(f"the cluster did not start, and was removed: {error}") from None
    if not started:
        raise HpcMpError(f"cluster {name}", "is already up",
                         f"use it with `export SLURM_CONF={lab.conf}`, or end it with `{mine('lab', 'down', *_named(name))}`")
    forget(chosen(name))
    _say(lab, name, time.monotonic() - start, as_json)
    _warn(nodes)


@command.command(help="End a cluster that `up` started, with all its processes, and remove its files.")
@name_option
def down(name: str | None) -> None:
    need_root()
    cluster = chosen(name)
    try:
        keeper.stop(cluster.directory)
    except LabError as error:
        raise RunFailed(f"the cluster did not end: {error}") from None
    if sys.stdout.isatty():
        click.echo("the cluster is removed; unset SLURM_CONF in the shells that have it")


@command.command(help="Show the nodes of the cluster that `up` started: Slurm's state, switch, cable, rate.")
@name_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(name: str | None, as_json: bool) -> None:
    cluster = chosen(name)
    nodes = host_views(cluster)
    if as_json:
        click.echo(json.dumps({
            "name": cluster.directory.name.removeprefix("hpc-mp-"), "slurm_conf": str(cluster.conf),
            "nodes": [asdict(node) for node in nodes]}))
        return
    table = Table("node", "switch", "address", "state", "cable", "rate", box=None, padding=(0, 2, 0, 0))
    for node in nodes:
        table.add_row(node.name, node.switch, node.address, node.state or "Slurm does not answer", *_cable(node))
    Console(highlight=False, emoji=False).print(table)
    click.echo(f"\nexport SLURM_CONF={cluster.conf}")


@command.command(help="Limit the network rate of nodes (by default all) in each direction: 200mbit, 1gbit; off removes the "
                      "limit.")
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
    try:
        if written == OFF:
            cluster.unshape(nodes)
        else:
            cluster.shape(written, nodes)
    except subprocess.CalledProcessError as error:
        raise HpcMpError(f"rate {rate}", f"was refused: {' '.join(error.stderr.split())}",
                         "write a rate that tc accepts, such as 200mbit") from None


@command.command(help="Unplug a node's cable, or plug it in.")
@click.argument("node")
@click.argument("state", type=click.Choice(["up", "down"]))
@name_option
def link(node: str, state: str, name: str | None) -> None:
    _root(name, [node]).link(node, state == "up")


@command.command(help="End all processes of a node at once, like a power failure. Slurm reports it down about 10 s later.")
@click.argument("node")
@name_option
def kill(node: str, name: str | None) -> None:
    cluster = _root(name, [node])
    if not cluster.runs(node):
        raise HpcMpError(f"node {node}", "is already off", f"start it with `{_typed('boot', name, node)}`")
    cluster.kill(node)


@command.command(help="Start a node that was killed.")
@click.argument("node")
@name_option
def boot(node: str, name: str | None) -> None:
    cluster = _root(name, [node])
    if cluster.runs(node):
        raise HpcMpError(f"node {node}", "is on", f"only a killed node can be booted: `{_typed('kill', name, node)}`")
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
    """Return the cluster of that name, else the cluster of SLURM_CONF, else the only one."""
    running = keeper.names()
    ours = Path(os.environ.get("SLURM_CONF", "")).resolve()
    name = name or next((up for up in running if ours == keeper.directory_of(up) / "etc" / "slurm.conf"), None)
    if name is None and len(running) > 1:
        raise HpcMpError("hpc-mp lab", f"{len(running)} clusters are up: {', '.join(running)}", "select one with --name")
    if not running or name not in (None, *running):
        value = "hpc-mp lab" if name is None else f"--name {name}"
        others = f"up: {', '.join(running)}; or s" if running else "s"
        raise HpcMpError(value, "no such cluster is up" if name else "no cluster is up",
                         f"{others}tart one: `{mine('lab', 'up', *(('--name', name) if name else ()))}`")
    return LabCluster(keeper.directory_of(name or running[0]))


def need_root() -> None:
    """Raise HpcMpError for users other than root, with the complete command for sudo, which uses its own search path."""
    if os.geteuid() != 0:
        raise HpcMpError("hpc-mp lab", "creates namespaces and network interfaces, which needs root",
                         f"run `{mine(*sys.argv[1:])}`")
    os.environ["PATH"] = f"{os.environ.get('PATH', '/usr/bin:/bin')}:{SBIN}"  # a plain `su` sets a PATH without daemons


def mine(*arguments: str) -> str:
    """Return a command of this hpc-mp with its full path, for sudo."""
    program = os.path.abspath(sys.argv[0])
    start = [sys.executable, "-m", "hpc_mp"] if program.endswith("__main__.py") else [program]
    return shlex.join(["sudo", *start, *arguments])


def _named(name: str | None) -> tuple[str, ...]:
    """Return the option for a cluster with another name than the default."""
    return ("--name", name) if name not in (None, "lab") else ()


def _typed(verb: str, name: str | None, node: str) -> str:
    """Return a command for root about a node of the cluster with this command's name."""
    return shlex.join(["hpc-mp", "lab", verb, *_named(name), node])


def _root(name: str | None, nodes: Sequence[str]) -> LabCluster:
    """Return the cluster, and check that the user is root and that these nodes exist."""
    need_root()
    cluster = chosen(name)
    for node in nodes:
        if node not in cluster.nodes:
            raise HpcMpError(f"node {node}", f"must be one of {', '.join(cluster.nodes)}", "pass one of these")
    return cluster


def _cable(node: HostView) -> tuple[str, str]:
    if node.cable is None:
        return "(root sees it)", "(root sees it)"
    return "up" if node.cable.up else "down", written(node.cable.rate) if node.cable.rate else "no limit"


def _refuse(accounting: bool) -> None:
    """Raise HpcMpError if this machine cannot run a cluster."""
    if sys.platform != "linux":
        raise HpcMpError("hpc-mp lab up", "needs namespaces of Linux, but this is another system",
                         "use a virtual machine with Debian or Ubuntu")
    need_root()
    packages = missing(PACKAGES | (ACCOUNTING if accounting else {}))
    if packages:
        raise HpcMpError(
            "hpc-mp lab up", f"lacks programs of Debian's and Ubuntu's packages {', '.join(packages)}",
            f"install them: `apt-get install --no-install-recommends {' '.join(packages)}`. Their daemons are not used; with "
            "systemd, run `systemctl mask munge slurmctld slurmd slurmdbd` first to keep them from starting")
    refusal = refused()
    if refusal:
        raise HpcMpError(
            "hpc-mp lab up", f"needs namespaces, bridges and shaped cables, which this machine refuses ({refusal})",
            "in a container, start it with --privileged; else use a kernel with bridge, veth and sch_tbf")


def _shown(show: Sequence[Path]) -> tuple[Path, ...]:
    """Return the directories below /tmp that the nodes see: the user's, this directory, and hpc-mp's installation, top down."""
    packages = [Path(file).parents[1] for file in (hpc_mp.__file__, __file__)]
    paths = (*show, Path.cwd(), *packages, Path(sys.prefix), Path(sys.base_prefix))
    whole = [Path(*path.resolve().parts[:3]) for path in paths]
    return tuple(path for path in dict.fromkeys(whole) if path.parts[:2] == ("/", "tmp") and len(path.parts) == 3)


def _say(lab: Lab, name: str, seconds: float, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({
            "name": name, "directory": str(lab.directory), "slurm_conf": str(lab.conf), "nodes": list(lab.nodes),
            "switches": [list(leaf) for leaf in lab.leaves], "shown_below_tmp": [str(path) for path in lab.keep],
            "seconds": seconds,
        }))
    elif sys.stdout.isatty():
        release = ".".join(f"{part:02d}" for part in installed_release())
        shared = f"; shared below it: {' '.join(map(str, lab.keep))}" if lab.keep else ""
        click.echo(STARTED.format(release=release, nodes=len(lab.nodes), seconds=seconds, conf=lab.conf, shared=shared,
                                  down=mine("lab", "down", *_named(name))))
    else:
        click.echo(f"export SLURM_CONF={lab.conf}")


def _warn(nodes: int) -> None:
    free = psutil.virtual_memory().available >> 20
    if free < nodes * RANK_MB:
        click.echo(f"note: {free} MB of memory are free; a rank on each of {nodes} nodes needs at least {nodes * RANK_MB} MB",
                   err=True)
    if nodes > 4 * (os.cpu_count() or 1):
        click.echo(f"note: {nodes} nodes share {os.cpu_count()} cores; ranks will wait for each other", err=True)
