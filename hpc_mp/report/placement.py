"""The placement as a terminal picture: nodes are boxes under their leaf switch and contain ranks with their coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hpc_mp.cluster.topology import SwitchTree
from hpc_mp.layout.placement.grid import Placement, RankPlace

STAGE_COLOURS: tuple[str, ...] = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")
RANKS_PER_LINE = 2


def picture(placement: Placement, max_nodes: int = 16, hosts: Sequence[str] = (),
            tree: SwitchTree | None = None) -> RenderableType:
    """Draw nodes as boxes, at most ``max_nodes``; ``5 d0p1t1`` = rank 5 at dp 0, pp 1, tp 1 (axes of degree 1 are left out).

    Colour shows the pipeline stage; bold alternates from one tensor group to the next. With ``hosts``, the host of every node,
    boxes have their names; with ``tree`` too, consecutive nodes are under the name of their leaf switch.
    """
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
