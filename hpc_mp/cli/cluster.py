"""``hpc-mp cluster``: the description of a Slurm cluster, wrong settings for training, bad nodes and switches."""

from __future__ import annotations

import importlib
import json

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.cluster_nodes import nodes
from hpc_mp.cli.cluster_topology import topology
from hpc_mp.cli.output import exit_by, print_findings
from hpc_mp.cluster.slurm.records import SHOW_CONFIG
from hpc_mp.lint.slurm_conf.config import ask_slurm
from hpc_mp.lint.slurm_conf.report import Description, PartitionReport
from hpc_mp.lint.slurm_conf.report import describe as described

MOVED = ("up", "status", "shape", "link", "kill", "boot", "at", "down", "render")
"""Verbs of release 0.0 that still work but are hidden in the help."""


class ClusterVerbs(click.Group):
    """Description of an existing cluster. ``up``, ``down`` … and ``render`` moved to ``lab`` and ``cloud``; they still work."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = "cloud" if cmd_name == "render" else "lab"
        if cmd_name in self.commands or cmd_name not in MOVED:
            return super().get_command(ctx, cmd_name)
        click.echo(f"hpc-mp cluster {cmd_name} is now hpc-mp {verb} {cmd_name}", err=True)
        group = importlib.import_module(f"hpc_mp.cli.{verb}").command
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


def _rows(partition: PartitionReport) -> list[tuple[str, ...]]:
    name = partition.name + ("*" if partition.default else "")
    rows = [(str(group.nodes), ", ".join(f"{count} {state.lower()}" for state, count in group.states.items()),
             str(group.cpus or "?"), f"{group.memory / 1024:.0f}" if group.memory else "?", group.gres or "–")
            for group in partition.groups]
    first = (name, partition.state.lower(), partition.max_time.lower())
    return [(*(first if number == 0 else ("", "", "")), *row) for number, row in enumerate(rows or [("0", "", "", "", "")])]
