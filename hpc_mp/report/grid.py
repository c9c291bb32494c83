"""The rank grid: the node, the coordinates and the communication groups of each rank."""

from collections.abc import Mapping
from itertools import groupby
from types import SimpleNamespace

from hpc_mp.layout.placement import Placement, RankPlace
from hpc_mp.report import colours
from hpc_mp.report.colours import Shade
from hpc_mp.rundir.records import RankStart

# Matplotlib's viridis, sampled: ordered like the stages, and distinguishable with any kind of colour vision.
RAMP = tuple((number / 9, rgb) for number, rgb in enumerate((
    (68, 1, 84), (72, 40, 120), (62, 74, 137), (49, 104, 142), (38, 130, 142), (31, 158, 137), (53, 183, 121), (110, 206, 88),
    (181, 222, 43), (253, 231, 37))))
RAMP_BEGIN, RAMP_END = 0.28, 0.9
DENSITIES = ((32, "roomy"), (128, "close"))  # maximum number of ranks with both labels in a cell; beyond: only the number
GROUPS = {"dp": "replicas", "pp": "pipeline", "cp": "context group", "tp": "tensor group"}
MOST_COLUMNS = 4
MEMBERS_SHOWN = 16


def grid(placement: Placement, starts: Mapping[int, RankStart], axes: tuple[str, ...] | None = None) -> SimpleNamespace:
    """Return the figure of a placement: ``columns`` cells side by side in a node, and the ``stages`` of the legend. The groups of
    a cell (``tp3``) are for highlighting. ``starts``: rank → its newest start, for ranks that have announced one. ``axes``: axes
    to show; None: those with more than one coordinate."""
    axes = present_axes(placement) if axes is None else axes
    shades = tuple(shade(stage, placement.degrees.pipeline) for stage in range(placement.degrees.pipeline))
    group_of = {axis: {rank: (number, group) for number, group in enumerate(placement.groups[axis]) for rank in group}
                for axis in axes}

    def cell(place: RankPlace) -> SimpleNamespace:
        mine = {axis: group_of[axis][place.rank] for axis in axes}
        where = f"{_name(place, starts)}, local rank {place.local_rank}"
        lines = [f"rank {place.rank} on {where}", " ".join(f"{axis} {getattr(place, axis)}" for axis in axes)]
        lines += [f"{GROUPS[axis]}: {_members(group)}" for axis, (_, group) in mine.items()]
        groups = [f"{axis}{number}" for axis, (number, _) in mine.items()]
        return SimpleNamespace(rank=place.rank, label=coordinates(place, axes), shade=shades[place.pp],
                               tip="\n".join(filter(None, lines)), groups=groups)

    def node(places: list[RankPlace]) -> SimpleNamespace:
        name = _name(places[0], starts)
        host = starts[places[0].rank].host if places[0].rank in starts else ""
        return SimpleNamespace(name=name, host="" if host == name else host, cells=tuple(map(cell, places)))

    ordered = sorted(placement.ranks, key=lambda place: (place.node, place.local_rank))
    nodes = tuple(node(list(places)) for _, places in groupby(ordered, lambda place: place.node))
    density = next((name for limit, name in DENSITIES if placement.degrees.world <= limit), "dense")
    columns = min(MOST_COLUMNS, placement.ranks_per_node)
    return SimpleNamespace(nodes=nodes, density=density, columns=columns, stages=shades, axes=axes)


def present_axes(placement: Placement) -> tuple[str, ...]:
    """Return the axes with more than one coordinate."""
    degrees = placement.degrees
    sizes = {"dp": degrees.data, "pp": degrees.pipeline, "cp": degrees.context, "tp": degrees.tensor}
    return tuple(axis for axis, count in sizes.items() if count > 1)


def coordinates(place: RankPlace, axes: tuple[str, ...]) -> str:
    """Return the coordinates on the given axes, such as ``d0 p1 t1``."""
    return " ".join(f"{axis[0]}{getattr(place, axis)}" for axis in axes)


def shade(stage: int, stages: int) -> Shade:
    """Return the colour of a stage: the ramp divided evenly among the stages."""
    share = (stage / (stages - 1) if stages > 1 else 0.15) * (RAMP_END - RAMP_BEGIN) + RAMP_BEGIN
    return colours.shade(colours.mixed(RAMP, share))


def _name(place: RankPlace, starts: Mapping[int, RankStart]) -> str:
    return starts[place.rank].node if place.rank in starts else f"node {place.node}"


def _members(group: tuple[int, ...]) -> str:
    more = f" … ({len(group)} ranks)" if len(group) > MEMBERS_SHOWN else ""
    return " ".join(map(str, group[:MEMBERS_SHOWN])) + more
