"""``hpc-mp cluster``: the description of a Slurm cluster, wrong settings for training, the ledger of bad nodes, and switches."""

import importlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.plugins import plugin
from hpc_mp.base.text import did_you_mean
from hpc_mp.cli.cluster_topology import topology
from hpc_mp.cli.output import exit_by, print_findings
from hpc_mp.cluster.bad_nodes import AVOIDED_S, BadNode, bad_nodes, findings, ledger, record, take_back
from hpc_mp.cluster.slurm.nodelist import compress, expand
from hpc_mp.cluster.slurm.nodes import node_states
from hpc_mp.cluster.slurm.records import SHOW_CONFIG, find_settings
from hpc_mp.lint.slurm_conf.config import ask_slurm
from hpc_mp.lint.slurm_conf.report import Description
from hpc_mp.lint.slurm_conf.report import describe as described

BY_HAND = "by hand"  # code and finder of a fault that a user reports
EVER_H = 24 * 365


@click.command(help="List the nodes that new jobs exclude, with the source and the reason, and suspected nodes, which are not "
                    "excluded. Or remove nodes from the list, or add them. Waiting runs remove their own exclusions if they need "
                    "the nodes.")
@click.option("--take-back", "back", metavar="LIST", multiple=True, help="Remove nodes from the list: n3, n[1-4].")
@click.option("--add", "added", metavar="LIST", multiple=True, help="Add nodes; new jobs exclude them if enough others exist.")
@click.option("--because", metavar="TEXT", help="With --add: the reason, in a sentence.")
@click.option("--suspected", is_flag=True, help="With --add: only record a suspicion; jobs still get the nodes.")
@click.option("--hours", type=click.IntRange(1, EVER_H), metavar="N", help="With --add: hours of the exclusion.  [default: 24]")
@click.option("--cluster", "cluster", metavar="NAME", help="Name of the cluster.  [default: the cluster of this machine]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def nodes(back: tuple[str, ...], added: tuple[str, ...], because: str | None, suspected: bool, hours: int | None,
          cluster: str | None, as_json: bool) -> None:
    name = cluster or _here()
    path = ledger(name)
    taken, additions = _names(back), _names(added)
    if (because is not None or suspected or hours is not None) and not additions:
        word = "--because" if because is not None else "--suspected" if suspected else "--hours"
        raise HpcMpError(word, "has an effect only with --add", "name the node: --add n3")
    if additions and not (because or "").strip():
        raise HpcMpError(f"--add {' '.join(added)}", "needs the reason, for later readers of the list",
                         '--because "its fan is broken"')
    if both := sorted({*taken} & {*additions}):
        raise HpcMpError(f"--take-back and --add {compress(both)}", "contradict each other", "remove one of them")
    held = {finding.node for finding in findings(path)}
    strangers = [node for node in taken if node not in held]
    if len(strangers) == len(taken):
        _check(taken, [*held], f"is not in the ledger of cluster {name}", "see `hpc-mp cluster nodes`")
    if additions and cluster is None:
        _check(additions, _known(), f"is not a node of cluster {name}", "see `sinfo -N`")
    try:
        out = take_back(path, taken)
        now = time.time()
        record(path, [BadNode(node, BY_HAND, " ".join((because or "").split()), BY_HAND, now,
                              now + (hours * 3600.0 if hours else AVOIDED_S), "suspected" if suspected else "certain")
                      for node in additions])
    except OSError as error:
        raise HpcMpError(str(path), f"cannot be written ({error.strerror})", "correct its permissions, or free space") from None
    if as_json:
        click.echo(json.dumps({
            "cluster": name, "ledger": str(path), "taken_back": sorted({finding.node for finding in out}),
            "not_in_ledger": strangers,
            "nodes": [asdict(finding) | {"avoided": finding.certainty != "suspected"} for finding in findings(path)]}))
        return
    if out:
        click.echo(f"removed: {compress(dict.fromkeys(finding.node for finding in out))}")
    if strangers:
        click.echo(f"not in the ledger: {compress(strangers)}")
    _show_nodes(name, path)


def _show_nodes(name: str, path: Path) -> None:
    entries = findings(path)
    if not entries:
        click.echo(f"cluster {name}: no bad or suspected nodes")
        return
    rows = [("node", "certainty", "since", "until", "fault"),
            *((finding.node, finding.certainty, _clock(finding.time), _clock(finding.until),
               f"{finding.code}: {finding.evidence}" + (f" ({finding.run})" if finding.run != finding.code else ""))
              for finding in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for *cells, fault in rows:  # one line per node even if it is long: a terminal wraps it, and grep finds all of it
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), fault]))
    avoided = bad_nodes(path)
    if avoided:
        click.echo(f"\nnew jobs exclude {compress(sorted(avoided))} if enough other nodes exist; "
                   f"`hpc-mp cluster nodes --take-back {min(avoided)}` removes one")
    else:
        click.echo("\nno node is excluded: these are suspicions")


def _clock(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M", time.localtime(seconds))


def _names(lists: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node for nodelist in lists for node in expand(nodelist)))


def _check(named: Sequence[str], candidates: Sequence[str], rule: str, remedy: str) -> None:
    """Raise HpcMpError for the first unknown node."""
    for node in named:
        if node not in candidates:
            raise HpcMpError(f"node {node}", rule, did_you_mean(node, candidates, remedy))


def _here() -> str:
    """Return the cluster's name. Raises HpcMpError if no Slurm reports it."""
    name = find_settings().get("ClusterName")
    if not name:
        raise HpcMpError("hpc-mp cluster nodes", "needs the name of the cluster, but no Slurm answers here",
                         "run it on a machine of the cluster, or pass --cluster NAME")
    return name


def _known() -> list[str]:
    try:
        return list(node_states())
    except CommandFailed as error:
        raise HpcMpError("this machine's cluster", str(error).splitlines()[-1],
                         "run it on a machine of the cluster, or pass --cluster NAME") from None


MOVED = ("up", "status", "shape", "link", "kill", "boot", "at", "down", "render")
"""Verbs of release 0.0 that still work but are hidden in the help."""


class ClusterVerbs(click.Group):
    """Description of an existing cluster. ``up``, ``down`` … and ``render`` moved to ``lab`` and ``cloud``; they still work."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = "cloud" if cmd_name == "render" else "lab"
        if cmd_name in self.commands or cmd_name not in MOVED:
            return super().get_command(ctx, cmd_name)
        click.echo(f"hpc-mp cluster {cmd_name} is now hpc-mp {verb} {cmd_name}", err=True)
        group = plugin("commands", verb) if verb == "lab" else importlib.import_module(f"hpc_mp.cli.{verb}").command
        assert isinstance(group, click.Group)
        return group.get_command(ctx, cmd_name)


@click.command(cls=ClusterVerbs, help="Describe a Slurm cluster; list its bad nodes; read, write and check its switches. "
               "Slurm is not changed.")
def command() -> None:
    pass


command.add_command(nodes)
command.add_command(topology)


@command.command(help="Show a Slurm cluster: partitions, GPUs, networks, switches, job settings; and wrong settings for "
                      "training, each with the reason and the remedy. Only scontrol is queried. Exit 1 for "
                      "a setting that makes jobs fail.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def describe(as_json: bool) -> None:
    try:
        description = described(ask_slurm())
    except CommandFailed as error:
        raise HpcMpError(" ".join(SHOW_CONFIG), str(error).splitlines()[-1], "run it on a machine of the cluster") from None
    if as_json:
        click.echo(json.dumps(description.document()))
    else:
        _show(description)
    exit_by(description.findings)


def _show(facts: Description) -> None:
    console = Console(highlight=False, emoji=False)
    console.print(f"[bold]{escape(facts.cluster)}[/], Slurm {escape(facts.settings.get('SLURM_VERSION') or '?')}\n")
    table = Table("partition", "state", "limit", "nodes", "states", "CPUs", "GiB", "GRES", box=None, padding=(0, 2, 0, 0))
    for partition in facts.partitions:
        for row in _rows(partition):
            table.add_row(*map(escape, row))
    console.print(table)
    storeys = " → ".join(map(str, facts.switches))
    for name, text in (
        ("topology", f"{facts.topology}, switches from the leaves up: {storeys}" if storeys else "Slurm knows no switches"),
        ("networks", ", ".join((*facts.networks, *filter(None, [facts.platform]))) or "not visible in features and GRES"),
        ("cgroups", "unknown" if facts.constrain is None else ", ".join(facts.constrain) or "no constraints"),
    ):
        console.print(escape(f"\n{name}: {text}"), end="")
    console.print("\n")
    settings = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for key, value in facts.settings.items():
        settings.add_row(escape(key), escape(value) if value else "[dim]not set[/]")
    console.print(settings)
    console.print("\n[bold]For training[/]")
    print_findings(facts.findings)
    if not facts.findings:
        console.print("no wrong settings in the output of scontrol")
    for text in facts.unseen:
        console.print(escape(f"not available: {text}"), style="dim")


def _rows(partition: Mapping[str, Any]) -> list[tuple[str, ...]]:
    name = partition["name"] + ("*" if partition["default"] else "")
    rows = [(str(group["nodes"]), ", ".join(f"{count} {state.lower()}" for state, count in group["states"].items()),
             str(group["cpus"] or "?"), f"{group['memory'] / 1024:.0f}" if group["memory"] else "?", group["gres"] or "–")
            for group in partition["groups"]]
    first = (name, partition["state"].lower(), partition["max_time"].lower())
    return [(*(first if number == 0 else ("", "", "")), *row) for number, row in enumerate(rows or [("0", "", "", "", "")])]
