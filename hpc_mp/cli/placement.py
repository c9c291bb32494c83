"""``hpc-mp placement``: the place and the coordinates of each rank, and the cost of a placement."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import click
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.programs import NUMBERINGS
from hpc_mp.base.text import counted
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.topology import SwitchTree, load_topology, order_hosts
from hpc_mp.layout.placement import ORDERS, Degrees, Placement, RankMap, RankPlace, normalize_order, numbered, place
from hpc_mp.layout.placement.grid import AXES, NODE_OF, Groups, reach_of, to_dict
from hpc_mp.planner.hosts import leaves, uplinks
from hpc_mp.planner.links import node_loads
from hpc_mp.rundir.plan import Traffic

RANKS_SHOWN = 64
GROUPS_SHOWN = 4
MEMBERS_SHOWN = 8
ONE_EACH = Traffic(1, 1, 1)  # without a model, edges are counted instead of bytes
SHOWN = ("tp", "pp", "dp")
STAGE_COLOURS: tuple[str, ...] = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")
RANKS_PER_LINE = 2


@dataclass(frozen=True, slots=True)
class Site:
    """The hosts of a placement's nodes, and the switches above them."""

    hosts: tuple[str, ...]
    tree: SwitchTree


@click.command(help="Show the place and the coordinates of each rank, and the cost.")
@click.option("--tp", "tensor", type=int, default=1, show_default=True, help="Tensor degree T.")
@click.option("--pp", "pipeline", type=int, default=1, show_default=True, help="Pipeline degree P.")
@click.option("--dp", "data", type=int, default=1, show_default=True, help="Data degree D: replicas of the model.")
@click.option("--cp", "context", type=int, default=1, show_default=True, help="Context degree C.")
@click.option("--ep", "expert", type=int, default=1, show_default=True, help="Expert degree E: blocks inside D × C.")
@click.option("--order", default="cluster", show_default=True,
              help="Letters D, P, C, T (the right-most varies fastest over ranks), cluster (DPT) or spread (TPD).")
@click.option("--axes", metavar="NAME", help="A program's own numbering of ranks, in this order on nodes: "
                                            f"{', '.join(NUMBERINGS)}, or letters.")
@click.option("--rank-map", default="auto", show_default=True, metavar="MAP",
              help="block (node after node), cyclic (rank r on node r mod N), the node of every rank as 0,0,1,1, or "
                   "auto: block, with the hosts of a leaf switch next to each other.")
@click.option("--ranks-per-node", type=int, default=8, show_default=True,
              help="Ranks on each node; the last node may have fewer.")
@click.option("--topology", "topology", metavar="FILE", type=click.Path(path_type=Path),
              help="topology.conf, topology.yaml, or the output of `scontrol show topology`.")
@click.option("--nodes", "nodelist", metavar="HOSTS", help="Hosts of the nodes, as n[1-4]; default: the topology's first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(tensor: int, pipeline: int, data: int, context: int, expert: int, order: str, axes: str | None, rank_map: str,
            ranks_per_node: int, topology: Path | None, nodelist: str | None, as_json: bool) -> None:
    degrees, nodes = Degrees(tensor, pipeline, data, context, expert), _rank_map(rank_map)
    chosen = (place(degrees, order, ranks_per_node, nodes) if axes is None
              else numbered(degrees, axes, order, ranks_per_node, nodes))
    letters = dict.fromkeys([*(normalize_order(name, context) for name in ORDERS), chosen.order])
    placements = [chosen if sequence == chosen.order else place(degrees, sequence, ranks_per_node, nodes) for sequence in letters]
    if nodelist is not None and topology is None:
        raise HpcMpError(f"--nodes {nodelist}", "has no effect without --topology", "add --topology FILE")
    site = None if topology is None else _site(chosen, load_topology(topology), nodelist)
    if as_json:
        click.echo(json.dumps(_tree(chosen, placements, site)))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{counted(degrees.world, 'rank')} on {counted(chosen.nodes, 'node')}, order {chosen.order}[/] "
                  f"(T {tensor} × P {pipeline} × C {context} × D {data}, E {expert})\n")
    console.print(picture(chosen, hosts=site.hosts, tree=site.tree) if site else picture(chosen))
    console.print("colour: pipeline stage; bold: every second tensor group\n")
    console.print("[bold]Ranks[/]", _rank_table(chosen, site), sep="\n")
    if (more := len(chosen.ranks) - RANKS_SHOWN) > 0:
        console.print(f"… and {more} more (--json lists all)")
    console.print("\n[bold]Groups[/]", _group_table(chosen), sep="\n")
    console.print("\n[bold]All orders[/]", _order_table(placements, chosen.order, site), sep="\n")
    console.print("(nodes spanned, inter-node hops) per group; edges: maximum that leave one node; "
                  "uplink: maximum that leave one leaf switch" if site else
                  "(nodes spanned, inter-node hops) per group; edges: maximum that leave one node")


def picture(placement: Placement, max_nodes: int = 16, hosts: Sequence[str] = (),
            tree: SwitchTree | None = None) -> RenderableType:
    """Draw nodes as boxes, at most ``max_nodes``; ``5 d0p1t1`` = rank 5 at dp 0, pp 1, tp 1 (axes of degree 1 are left out).
    Colour shows the pipeline stage; bold alternates from one tensor group to the next. With ``hosts``, the host of every node,
    boxes have their names; with ``tree`` too, consecutive nodes are under the name of their leaf switch."""
    degrees = placement.degrees
    sizes = {"dp": degrees.data, "pp": degrees.pipeline, "cp": degrees.context, "tp": degrees.tensor}
    axes = [axis for axis, size in sizes.items() if size > 1]
    bold = {rank for group in placement.groups["tp"][1::2] if degrees.tensor > 1 for rank in group}
    digits = len(str(degrees.world - 1))

    def cell(place: RankPlace) -> Text:
        coordinates = "".join(f"{axis[0]}{getattr(place, axis)}" for axis in axes)
        colour = STAGE_COLOURS[place.pp % len(STAGE_COLOURS)]
        style = f"bold {colour}" if place.rank in bold else colour
        return Text(f"{place.rank:>{digits}} {coordinates}".rstrip(), style)

    def box(node: int, places: list[RankPlace]) -> Panel:
        grid = Table.grid(padding=(0, 2))
        for i in range(0, len(places), RANKS_PER_LINE):
            grid.add_row(*map(cell, places[i : i + RANKS_PER_LINE]))
        return Panel(grid, title=hosts[node] if hosts else f"node {node}", expand=False)

    by_node = groupby(sorted(placement.ranks, key=lambda p: (p.node, p.local_rank)), key=lambda p: p.node)
    boxes = [(node, box(node, list(places))) for node, places in by_node if node < max_nodes]
    lines: list[RenderableType] = []
    for leaf, under in groupby(boxes, key=lambda item: tree.leaf(hosts[item[0]]) or "no switch" if tree else ""):
        lines += [Text(f"{leaf}:", "bold")] if tree else []
        lines.append(Columns([panel for _, panel in under]))
    more = placement.nodes - len(boxes)
    return Group(*lines, *([Text(f"… and {more} more nodes")] if more else []))


def _rank_map(text: str) -> RankMap:
    if text in NODE_OF:
        return text
    try:
        return tuple(int(node) for node in text.split(","))
    except ValueError:
        raise HpcMpError(f"--rank-map {text}", f"is neither {', '.join(NODE_OF)} nor the node of every rank",
                         "write for example --rank-map 0,0,1,1") from None


def _site(placement: Placement, tree: SwitchTree, nodelist: str | None) -> Site:
    """Return the hosts of the nodes. Under the map ``auto``, hosts of one leaf are neighbours, as in a job."""
    hosts = expand(nodelist) if nodelist is not None else tuple(tree.above)
    if len(hosts) < placement.nodes or (nodelist is not None and len(hosts) > placement.nodes):
        source = "the topology" if nodelist is None else f"--nodes {nodelist}"
        raise HpcMpError(source, f"names {counted(len(hosts), 'host')}, but the placement has {counted(placement.nodes, 'node')}",
                         f"name {counted(placement.nodes, 'host')} with --nodes, or change the degrees or --ranks-per-node")
    strange = [host for host in hosts if host not in tree.above]
    if strange:
        raise HpcMpError(f"--nodes {nodelist}", f"names {strange[0]}, which is not in the topology", "name hosts of the topology")
    hosts = hosts[: placement.nodes]
    if placement.rank_map == "auto":
        hosts = order_hosts(hosts, tree)
    return Site(hosts, tree)


def _tree(chosen: Placement, placements: list[Placement], site: Site | None) -> dict[str, object]:
    tree = to_dict(chosen) | {
        "cost": {name: asdict(reach) for name, reach in reach_of(chosen).items()},
        "orders": {p.order: {name: asdict(reach) for name, reach in reach_of(p).items()} for p in placements},
    }
    if site is None:
        return tree
    of = leaves(chosen, site.hosts, site.tree)
    return tree | {
        "hosts": site.hosts,
        "ranks": [asdict(at) | {"host": site.hosts[at.node], "leaf": of[at.rank]} for at in chosen.ranks],
        "uplinks": {p.order: {leaf: {axis: getattr(load, axis) for axis in SHOWN} for leaf, load in _uplinks(p, site).items()}
                    for p in placements},
    }


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0))


def _rank_table(placement: Placement, site: Site | None) -> Table:
    table = _table("rank", *(("host", "leaf") if site else ("node",)), "local", *AXES.values())
    of = leaves(placement, site.hosts, site.tree) if site else ()
    for at in placement.ranks[:RANKS_SHOWN]:
        where = (site.hosts[at.node], of[at.rank]) if site else (at.node,)
        table.add_row(*map(str, (at.rank, *where, at.local_rank, *(getattr(at, axis) for axis in AXES.values()))))
    return table


def _group_table(placement: Placement) -> Table:
    reach = reach_of(placement)
    table = _table("kind", "number", "size", "nodes spanned", "hops", "ranks")
    for name, groups in placement.groups.items():
        table.add_row(name, str(len(groups)), str(len(groups[0])), str(reach[name].nodes), str(reach[name].hops),
                      _members(groups))
    return table


def _members(groups: Groups) -> str:
    def shown(group: tuple[int, ...]) -> str:
        return " ".join(map(str, group[:MEMBERS_SHOWN])) + (" …" if len(group) > MEMBERS_SHOWN else "")

    return " | ".join(map(shown, groups[:GROUPS_SHOWN])) + (" | …" if len(groups) > GROUPS_SHOWN else "")


def _order_table(placements: list[Placement], chosen: str, site: Site | None) -> Table:
    """Return every order: the reach of each axis, and the number of its edges that leave the busiest node and leaf."""
    axes = [axis for axis in ("tp", "pp", "dp", "cp") if axis in placements[0].groups]
    table = _table("", "order", *(axis[0].upper() for axis in axes), "edges T/P/D", *(["uplink T/P/D"] if site else []))
    for placement in placements:
        reach = reach_of(placement)
        cells = [_most(node_loads(placement, ONE_EACH))]
        if site is not None:
            cells.append(_most(_uplinks(placement, site).values()))
        table.add_row("→" if placement.order == chosen else "", placement.order,
                      *(f"({reach[axis].nodes}, {reach[axis].hops})" for axis in axes), *cells)
    return table


def _uplinks(placement: Placement, site: Site) -> dict[str, Traffic]:
    return uplinks(placement, ONE_EACH, site.hosts, site.tree)


def _most(loads: Iterable[Traffic]) -> str:
    """Return the maximum on every axis: ``4/0/8``."""
    traffic = tuple(loads)
    return "/".join(str(int(max(getattr(load, axis) for load in traffic))) for axis in SHOWN)
