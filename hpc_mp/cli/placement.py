"""``hpc-mp placement``: which rank does what where, and what it costs."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from hpc_mp.errors import HpcMpError
from hpc_mp.placement.cost import Span, Traffic, node_loads, spans
from hpc_mp.placement.grid import AXES, ORDERS, Degrees, Groups, Placement, normalize_order, place, to_dict
from hpc_mp.placement.picture import picture

RANKS_SHOWN = 64
GROUPS_SHOWN = 4
MEMBERS_SHOWN = 8


@click.command(help="Show which rank does what where, and what it costs.")
@click.option("--tp", "tensor", type=int, default=1, show_default=True, help="Tensor degree T.")
@click.option("--pp", "pipeline", type=int, default=1, show_default=True, help="Pipeline degree P.")
@click.option("--dp", "data", type=int, default=1, show_default=True, help="Data degree D: replicas of the model.")
@click.option("--cp", "context", type=int, default=1, show_default=True, help="Context degree C.")
@click.option("--ep", "expert", type=int, default=1, show_default=True, help="Expert degree E: blocks inside D × C.")
@click.option("--order", default="cluster", show_default=True,
              help="Letters D, P, C, T (the right-most varies fastest over ranks), cluster (DPT) or spread (TPD).")
@click.option("--ranks-per-node", type=int, default=8, show_default=True, help="The last node may be part-filled.")
@click.option("--topology", metavar="FILE", help="Not built yet.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    tensor: int, pipeline: int, data: int, context: int, expert: int, order: str, ranks_per_node: int,
    topology: str | None, as_json: bool,
) -> None:
    if topology is not None:
        raise HpcMpError(f"--topology {topology}", "not built yet", "leave it out: nodes are taken as equally far apart")
    degrees = Degrees(tensor, pipeline, data, context, expert)
    chosen = place(degrees, order, ranks_per_node)
    letters = dict.fromkeys([*(normalize_order(each, context) for each in ORDERS), chosen.order])
    placements = [place(degrees, each, ranks_per_node) for each in letters]
    if as_json:
        click.echo(json.dumps(to_dict(chosen) | {
            "cost": {name: asdict(span) for name, span in spans(chosen).items()},
            "orders": {p.order: {name: asdict(span) for name, span in spans(p).items()} for p in placements},
        }))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{degrees.world} ranks on {chosen.nodes} nodes, order {chosen.order}[/] "
                  f"(T {tensor} × P {pipeline} × C {context} × D {data}, E {expert})\n")
    console.print(picture(chosen))
    console.print("colour: pipeline stage; bold: every second tensor group\n")
    console.print("[bold]Ranks[/]", _rank_table(chosen), sep="\n")
    if (more := len(chosen.ranks) - RANKS_SHOWN) > 0:
        console.print(f"… and {more} more (--json lists all)")
    console.print("\n[bold]Groups[/]", _group_table(chosen), sep="\n")
    console.print("\n[bold]All orders[/]", _order_table(placements, chosen.order), sep="\n")
    console.print("(nodes spanned, inter-node hops) per group; edges: the most that leave one node")


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0))


def _rank_table(placement: Placement) -> Table:
    table = _table("rank", "node", "local", *AXES.values())
    for at in placement.ranks[:RANKS_SHOWN]:
        table.add_row(*map(str, (at.rank, at.node, at.local_rank, *(getattr(at, axis) for axis in AXES.values()))))
    return table


def _group_table(placement: Placement) -> Table:
    reach = spans(placement)
    table = _table("kind", "number", "size", "nodes spanned", "hops", "ranks")
    for name, groups in placement.groups.items():
        table.add_row(name, str(len(groups)), str(len(groups[0])), str(reach[name].nodes), str(reach[name].hops),
                      _members(groups))
    return table


def _members(groups: Groups) -> str:
    def shown(group: tuple[int, ...]) -> str:
        return " ".join(map(str, group[:MEMBERS_SHOWN])) + (" …" if len(group) > MEMBERS_SHOWN else "")

    return " | ".join(map(shown, groups[:GROUPS_SHOWN])) + (" | …" if len(groups) > GROUPS_SHOWN else "")


def _order_table(placements: list[Placement], chosen: str) -> Table:
    """Every order: how far each axis reaches, and how many of its edges leave the busiest node."""
    axes = [axis for axis in ("tp", "pp", "dp", "cp") if axis in placements[0].groups]
    table = _table("", "order", *(axis[0].upper() for axis in axes), "edges T/P/D")
    for placement in placements:
        reach = spans(placement)
        loads = node_loads(placement, Traffic(1, 1, 1))
        edges = "/".join(str(int(max(getattr(load, axis) for load in loads))) for axis in ("tp", "pp", "dp"))
        table.add_row("→" if placement.order == chosen else "", placement.order,
                      *(_span(reach[axis]) for axis in axes), edges)
    return table


def _span(span: Span) -> str:
    return f"({span.nodes}, {span.hops})"
