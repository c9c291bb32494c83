"""Traffic of a placement's ranks over the links between nodes and between switches."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise, permutations
from typing import TypeVar

from hpc_mp.layout.placement import Placement
from hpc_mp.rundir.plan import Traffic

Unit = TypeVar("Unit", bound=Hashable)
Group = tuple[int, ...]
Edges = Iterator[tuple[int, int]]


def _ring(group: Group) -> Edges:
    """Yield a ring: every rank sends to the next, the last to the first."""
    return zip(group, group[1:] + group[:1], strict=True)


def _chain(group: Group) -> Edges:
    """Yield a chain: every stage sends activations to the next one and gradients to the one before."""
    for a, b in pairwise(group):
        yield a, b
        yield b, a


def _ends(group: Group) -> Edges:
    """Yield both directions between the first and the last stage."""
    if len(group) > 1:
        yield group[0], group[-1]
        yield group[-1], group[0]


def _shards(group: Group, shards: int | None) -> Edges:
    """Yield the rings of shard groups, which are blocks of data × context."""
    size = shards or len(group)
    for begin in range(0, len(group), size):
        yield from _ring(group[begin:begin + size])


def _replicas(group: Group, shards: int | None) -> Edges:
    """Yield the rings of ranks that hold the same part; they are ``shards`` apart."""
    for begin in range(shards or 0):
        yield from _ring(group[begin::shards])


# axis -> the groups of the placement that it uses, and the (sender, receiver) pairs in one of them
AXES: dict[str, tuple[str, Callable[[Group, Traffic], Edges]]] = {
    "tp": ("tp", lambda group, _: _ring(group)),
    "cp": ("cp", lambda group, _: _ring(group)),
    "cp_pairs": ("cp", lambda group, _: permutations(group, 2)),
    "pp": ("pp", lambda group, _: _chain(group)),
    "ep": ("ep", lambda group, _: permutations(group, 2)),
    "dp": ("dp", lambda group, traffic: _shards(group, traffic.shards)),
    "replicas": ("dp", lambda group, traffic: _replicas(group, traffic.shards)),
    "expert_dp": ("edp", lambda group, traffic: _shards(group, traffic.expert_shards)),
    "expert_replicas": ("edp", lambda group, traffic: _replicas(group, traffic.expert_shards)),
    "tied": ("pp", lambda group, _: _ends(group)),
}


def node_loads(placement: Placement, traffic: Traffic) -> tuple[Traffic, ...]:
    """Return the bytes per axis that leave each node in one optimizer step."""
    loads = unit_loads(placement, traffic, nodes_of(placement))
    return tuple(loads[node] for node in range(placement.nodes))


def unit_loads(placement: Placement, traffic: Traffic, unit_of: Sequence[Unit]) -> dict[Unit, Traffic]:
    """Return the bytes per axis that leave each unit (a node, a leaf switch) in one step; ``unit_of``: the unit by rank."""
    edges = edges_out(placement, traffic, unit_of)
    stages = range(placement.degrees.pipeline)
    return {unit: load_of(traffic, {axis: sum(edges[axis, stage, unit] for stage in stages) for axis in AXES})
            for unit in dict.fromkeys(unit_of)}


def node_edges(placement: Placement, traffic: Traffic) -> Counter[tuple[str, int, int]]:
    """Return the number of message paths from node to node, by (axis, sender, receiver)."""
    node = nodes_of(placement)
    return Counter((axis, node[a], node[b]) for axis, a, b in _edges(placement, traffic) if node[a] != node[b])


def flows(placement: Placement, traffic: Traffic) -> dict[tuple[int, int], Traffic]:
    """Return the bytes per axis that one node sends another in one optimizer step, by (sender, receiver)."""
    counts = node_edges(placement, traffic)
    return {(a, b): load_of(traffic, {axis: counts[axis, a, b] for axis in AXES})
            for a, b in dict.fromkeys((a, b) for _, a, b in counts)}


def edges_out(placement: Placement, traffic: Traffic, unit_of: Sequence[Unit]) -> Counter[tuple[str, int, Unit]]:
    """Return the number of message paths out of each unit, by (axis, sender's stage, unit)."""
    return Counter((axis, placement.ranks[a].pp, unit_of[a]) for axis, a, b in _edges(placement, traffic)
                   if unit_of[a] != unit_of[b])


def load_of(traffic: Traffic, edges: dict[str, int]) -> Traffic:
    """Return the bytes of that many messages of each axis. Edges are counted before they are multiplied: equal counts then
    give equal bytes, and ties stay ties."""
    return Traffic(**{axis: count * getattr(traffic, axis) for axis, count in edges.items()})


def nodes_of(placement: Placement) -> list[int]:
    """Return the node of every rank."""
    return [place.node for place in placement.ranks]


def _edges(placement: Placement, traffic: Traffic) -> Iterator[tuple[str, int, int]]:
    """Yield every (axis, sender, receiver). State and gradients travel among the ranks of data × context."""
    return ((axis, a, b) for axis, (kind, edges) in AXES.items()
            for group in (placement.state_groups if kind == "dp" else placement.groups.get(kind, ()))
            for a, b in edges(group, traffic))
