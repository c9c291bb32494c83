"""``hpc-mp cluster status``, ``shape``, ``link``, ``kill``, ``boot``, ``at``: a running cluster of this machine; its faults."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.lab_which import chosen, name_option, need_root
from hpc_mp.lab.cluster import Cluster
from hpc_mp.lab.view import Node, look, written

RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?bit)")
OFF = "off"


@click.command(help="Show the nodes of the cluster that `up` started: Slurm's state, switch, cable, rate.")
@name_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(name: str | None, as_json: bool) -> None:
    cluster = chosen(name)
    nodes = look(cluster)
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


@click.command(help="Limit what nodes (all, unless named) send and receive, each way: 200mbit, 1gbit; off takes the limit away.")
@click.argument("rate")
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@name_option
def shape(rate: str, nodes: tuple[str, ...], name: str | None) -> None:
    written = rate.lower()
    found = RATE.fullmatch(written)
    if written != OFF and (found is None or not float(found[1])):
        raise HpcMpError(f"rate {rate}", "must be a number above 0 with bit, kbit, mbit or gbit (per second)",
                         "write for example 200mbit, or off for no limit")
    cluster = _root(name, nodes)
    with _said(f"rate {rate}", "write one that tc takes, such as 200mbit"):
        if written == OFF:
            cluster.unshape(nodes)
        else:
            cluster.shape(written, nodes)


@click.command(help="Pull a node's cable, or put it back.")
@click.argument("node")
@click.argument("state", type=click.Choice(["up", "down"]))
@name_option
def link(node: str, state: str, name: str | None) -> None:
    _root(name, [node]).link(node, state == "up")


@click.command(help="End all processes of a node at once, as a power cut does. Slurm calls it down some 10 s later.")
@click.argument("node")
@name_option
def kill(node: str, name: str | None) -> None:
    cluster = _root(name, [node])
    if not cluster.runs(node):
        raise HpcMpError(f"node {node}", "is off already", f"start it with `hpc-mp cluster boot {node}`")
    cluster.kill(node)


@click.command(help="Start a node that was killed.")
@click.argument("node")
@name_option
def boot(node: str, name: str | None) -> None:
    cluster = _root(name, [node])
    if cluster.runs(node):
        raise HpcMpError(f"node {node}", "is on", f"only a node that was killed can be booted: `hpc-mp cluster kill {node}`")
    cluster.boot(node)


@click.command(help="Run a command inside a node, as root: hpc-mp cluster at n2 ip address",
               context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@name_option
@click.argument("node")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def at(name: str | None, node: str, command: tuple[str, ...]) -> None:
    cluster = _root(name, [node])
    if not cluster.runs(node):
        raise HpcMpError(f"node {node}", "is off", f"start it with `hpc-mp cluster boot {node}`")
    raise click.exceptions.Exit(subprocess.run([*cluster.inside(node), *command], env=cluster.environ).returncode)


def _root(name: str | None, nodes: Sequence[str]) -> Cluster:
    """The cluster, for root, with these nodes in it."""
    need_root()
    cluster = chosen(name)
    for node in nodes:
        if node not in cluster.nodes:
            raise HpcMpError(f"node {node}", f"is none of {', '.join(cluster.nodes)}", "name one of these")
    return cluster


@contextmanager
def _said(value: str, remedy: str) -> Iterator[None]:
    """What a program of the system refuses, in its own words."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        words = " ".join(error.stderr.split())
        raise HpcMpError(value, f"was refused: {words}", remedy) from None


def _cable(node: Node) -> tuple[str, str]:
    if node.cable is None:
        return "(root sees it)", "(root sees it)"
    return "up" if node.cable.up else "down", written(node.cable.rate) if node.cable.rate else "no limit"


