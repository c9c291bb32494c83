"""The placement of ranks: letter orders as axis permutations of one arange, and the groups they make.

A letter order such as ``DPT`` names the axes data, pipeline, (context) and tensor. The right-most letter varies fastest over
ranks, as in SageMaker's ``placement_strategy``: ``cluster`` = ``DPT``, ``spread`` = ``TPD``.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise, permutations
from typing import Any

from hpc_mp.base.errors import HpcMpError

ORDERS: tuple[str, ...] = tuple(map("".join, permutations("DPT")))
ORDERS_WITH_CONTEXT: tuple[str, ...] = tuple(map("".join, permutations("DPCT")))
LETTERS = frozenset((*ORDERS, *ORDERS_WITH_CONTEXT))
ALIASES: dict[str, str] = {"cluster": "DPT", "spread": "TPD"}
AXES: dict[str, str] = {"D": "dp", "P": "pp", "C": "cp", "T": "tp"}

Groups = tuple[tuple[int, ...], ...]
RankMap = str | tuple[int, ...]
"""``auto``, ``block``, ``cyclic``, or the node (from 0) of every rank."""


NODE_OF: dict[str, Callable[[int, int, int], int]] = {  # (rank, ranks per node, nodes) -> node
    **dict.fromkeys(("auto", "block"), lambda rank, ranks_per_node, nodes: rank // ranks_per_node),
    "cyclic": lambda rank, ranks_per_node, nodes: rank % nodes}


@dataclass(frozen=True, slots=True)
class Degrees:
    """The size of every axis. ``data`` counts replicas (SageMaker's ``rdp``). ``expert`` is not a factor of the world: expert
    groups are blocks of ranks inside data × context. Raises HpcMpError for a degree below 1, or ``expert`` not dividing data ×
    context."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            _at_least_one(field.name, getattr(self, field.name))
        if self.data * self.context % self.expert:
            product = self.data * self.context
            raise HpcMpError(f"expert = {self.expert}",
                             f"does not divide data({self.data}) × context({self.context}) = {product}",
                             f"use a divisor of {product}")

    @property
    def world(self) -> int:
        """Number of ranks: tensor × pipeline × data × context."""
        return self.tensor * self.pipeline * self.data * self.context


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank: its node (from 0), its index there, and its coordinate on every axis."""

    rank: int
    node: int
    local_rank: int
    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Placement:
    """All ranks in ascending order, with the order, the degrees and the rank map that produced them."""

    order: str
    degrees: Degrees
    ranks_per_node: int
    rank_map: RankMap
    ranks: tuple[RankPlace, ...]

    @property
    def nodes(self) -> int:
        """Number of nodes; the last one may be partly filled."""
        return 1 + max(place.node for place in self.ranks)

    @cached_property
    def groups(self) -> dict[str, Groups]:
        """Ranks that communicate along an axis: name → groups, ascending inside and by first rank. ``tp``, ``pp``, ``dp`` (only
        the replica axis D, SageMaker's ``rdp``), ``mp`` (T × P), ``tp_dp`` (T × D, SageMaker's ``dp``); ``cp`` if context > 1;
        ``ep`` if expert > 1, and ``edp``, the ranks with the same experts (Megatron-LM's name)."""
        along = {"tp": ("tp",), "pp": ("pp",), "dp": ("dp",), "mp": ("tp", "pp"), "tp_dp": ("tp", "dp")}
        along |= {"cp": ("cp",)} if self.degrees.context > 1 else {}
        groups = {name: self._along(*axes) for name, axes in along.items()}
        if (size := self.degrees.expert) > 1:
            everyone = self.state_groups
            groups["ep"] = tuple(sorted(group[i : i + size] for group in everyone for i in range(0, len(group), size)))
            groups["edp"] = tuple(sorted(group[first::size] for group in everyone for first in range(size)))
        return groups

    @cached_property
    def state_groups(self) -> Groups:
        """Ranks that train the same parameters, those of data × context: they shard state, and sum gradients."""
        return self._along("dp", "cp")

    def _along(self, *axes: str) -> Groups:
        """Return the groups of ranks that differ only in the coordinates ``axes``."""
        fixed = [axis for axis in AXES.values() if axis not in axes]
        members: dict[tuple[int, ...], list[int]] = {}
        for place in self.ranks:
            members.setdefault(tuple(getattr(place, axis) for axis in fixed), []).append(place.rank)
        return tuple(map(tuple, members.values()))


def normalize_order(order: str, context: int = 1) -> str:
    """Return the letters of an order or of its alias. With ``context`` > 1 an order without C gets it directly before T. Raises
    HpcMpError if it is neither ``cluster``, ``spread`` nor a permutation of DPT or DPCT in capitals."""
    letters = ALIASES.get(order, order)
    if letters not in LETTERS:
        named = f"use cluster, spread, or letters such as {', '.join(ORDERS)}"
        raise HpcMpError(f"order = {order!r}", "must be cluster, spread, or a permutation of the letters DPT or DPCT",
                         f"write {order.upper()}" if order.upper() in LETTERS else named)
    return letters.replace("T", "CT") if context > 1 and "C" not in letters else letters


def place(degrees: Degrees, order: str, ranks_per_node: int = 8, rank_map: RankMap = "block") -> Placement:
    """Lay ``degrees.world`` ranks out in the given order on N = ⌈world / ranks_per_node⌉ nodes.

    The order gives every rank its coordinates, the map its node: ``block`` fills node after node, ``cyclic`` puts rank r on node
    r mod N, a tuple names the node of every rank. ``auto`` is ``block``: with known switches the hosts are sorted, not the ranks.
    Local ranks count up on each node in the order of ranks. Raises HpcMpError for an unknown order or map, for a map that does
    not assign these ranks to nodes 0 to N − 1 with at most ``ranks_per_node`` on each, and for ``ranks_per_node`` < 1.
    """
    _at_least_one("ranks_per_node", ranks_per_node)
    letters = normalize_order(order, degrees.context)
    sizes = {"D": degrees.data, "P": degrees.pipeline, "C": degrees.context, "T": degrees.tensor}

    def coordinates(rank: int) -> dict[str, int]:
        indices = dict.fromkeys(AXES.values(), 0)
        for letter in reversed(letters):
            rank, indices[AXES[letter]] = divmod(rank, sizes[letter])
        return indices

    taken: Counter[int] = Counter()  # ranks on each node so far
    ranks = []
    for rank, node in enumerate(_nodes(degrees.world, ranks_per_node, rank_map)):
        ranks.append(RankPlace(rank, node, taken[node], **coordinates(rank)))
        taken[node] += 1
    return Placement(letters, degrees, ranks_per_node, rank_map, tuple(ranks))


def _nodes(world: int, ranks_per_node: int, rank_map: RankMap) -> tuple[int, ...]:
    nodes = -(-world // ranks_per_node)
    if isinstance(rank_map, tuple):
        counts = Counter(rank_map)
        if len(rank_map) != world or set(counts) != set(range(nodes)) or max(counts.values()) > ranks_per_node:
            raise HpcMpError(f"rank_map = {','.join(map(str, rank_map))}",
                             f"does not put {world} ranks on the nodes 0 to {nodes - 1}, at most {ranks_per_node} on each",
                             f"name the node of each of the {world} ranks")
        return rank_map
    if rank_map not in NODE_OF:
        raise HpcMpError(f"rank_map = {rank_map!r}", f"must be {', '.join(NODE_OF)}, or the node of every rank",
                         "write for example block, or 0,0,1,1")
    return tuple(NODE_OF[rank_map](rank, ranks_per_node, nodes) for rank in range(world))


@dataclass(frozen=True, slots=True)
class Reach:
    """The reach of the groups of one axis: nodes spanned and inter-node hops, each the maximum over the groups."""

    nodes: int
    hops: int


def reach_of(placement: Placement) -> dict[str, Reach]:
    """Return the reach of every kind of group. Hops are the inter-node edges met when a group's ranks are walked in ascending
    order, without the closing edge."""
    node = [place.node for place in placement.ranks]

    def reach(groups: Groups) -> Reach:
        return Reach(nodes=max(len({node[rank] for rank in group}) for group in groups),
                     hops=max(sum(node[a] != node[b] for a, b in pairwise(group)) for group in groups))

    return {name: reach(groups) for name, groups in placement.groups.items()}


def to_dict(placement: Placement) -> dict[str, Any]:
    """Return the content of ``placement.json``."""
    return {
        "order": placement.order,
        "degrees": asdict(placement.degrees),
        "world": placement.degrees.world,
        "nodes": placement.nodes,
        "ranks_per_node": placement.ranks_per_node,
        "rank_map": placement.rank_map,
        "ranks": [asdict(place) for place in placement.ranks],
        "groups": {name: [list(group) for group in groups] for name, groups in placement.groups.items()},
    }


def from_dict(tree: dict[str, Any]) -> Placement:
    """Read the result of ``to_dict``; groups are derived again from the coordinates. Raises HpcMpError if a key is missing or of
    the wrong type."""
    try:
        rank_map = tree["rank_map"]
        return Placement(tree["order"], Degrees(**tree["degrees"]), tree["ranks_per_node"],
                         rank_map if isinstance(rank_map, str) else tuple(rank_map),
                         tuple(RankPlace(**place) for place in tree["ranks"]))
    except (KeyError, TypeError) as error:
        raise HpcMpError("placement.json", f"is not a placement ({error})", "launch the job again") from None


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise HpcMpError(f"{name} = {value}", "must be at least 1", f"set {name} to 1 or more")
