"""What a placement costs: nodes a group spans, and the bytes that a step waits for on the links between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from hpc_mp.layout.placement.grid import ORDERS, Degrees, Groups, Placement, RankMap, place

Unit = TypeVar("Unit", bound=Hashable)

DEFAULT_BANDWIDTH = 25e9
"""Bytes per second out of a node: one 200 Gb/s port. It scales all orders alike and so never changes the choice."""


@dataclass(frozen=True, slots=True)
class Span:
    """How far the groups of one axis reach: nodes spanned and inter-node hops, each the maximum over the groups."""

    nodes: int
    hops: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per optimizer step and axis.

    As a model's traffic: ``tp`` and ``dp`` = what one rank sends to its ring neighbour, ``pp`` = what crosses one stage
    boundary in one direction per rank. As a node's load: the bytes that leave the node.
    """

    tp: float = 0.0
    pp: float = 0.0
    dp: float = 0.0

    @property
    def total(self) -> float:
        return self.tp + self.pp + self.dp


@dataclass(frozen=True, slots=True)
class Backend:
    """How a communication library treats the data axis.

    Attributes:
        reduce_scatter: its bytes, relative to a ring's (D−1)/D of the stage.
        in_turn: a reduction holds up the backward it belongs to, and with it the stages before: stages use the links
            one after another. Otherwise they do so side by side.
    """

    reduce_scatter: int
    in_turn: bool


NCCL = Backend(reduce_scatter=1, in_turn=False)
GLOO = Backend(reduce_scatter=2, in_turn=True)
"""torch's gloo makes a reduce-scatter of an all-reduce, and FSDP2 has no streams on CPUs. Both were measured on four
nodes at 200 Mbit/s: 11.4 MB left each node per step, where a ring reduce-scatter makes 7.9; and the data axis took
twice as long where a node holds two ranks of one stage as where it holds one rank of each of two stages."""


@dataclass(frozen=True, slots=True)
class OrderCost:
    """One order: its busiest node, the bytes per axis that leave it in a step, the bytes a step waits for, and how long.

    ``waited`` is the busiest node's load where stages use the links side by side. Where they take turns it is the
    largest load of tensor and pipeline traffic, plus every stage's largest load of data traffic.
    """

    order: str
    node: int
    load: Traffic
    waited: float
    seconds: float


def spans(placement: Placement) -> dict[str, Span]:
    """Nodes spanned and inter-node hops of every kind of group.

    Hops are the inter-node edges met when a group's ranks are walked in ascending order, without the closing edge.
    """
    node = [place.node for place in placement.ranks]

    def span(groups: Groups) -> Span:
        return Span(nodes=max(len({node[rank] for rank in group}) for group in groups),
                    hops=max(sum(node[a] != node[b] for a, b in pairwise(group)) for group in groups))

    return {name: span(groups) for name, groups in placement.groups.items()}


def traffic(
    degrees: Degrees,
    *,
    hidden: int,
    sequence: int,
    microbatch_size: int,
    microbatches: int,
    layers_per_stage: int,
    stage_parameters: int,
    bytes_per_element: int,
    zero: int,
    backend: Backend = NCCL,
) -> Traffic:
    """Bytes per optimizer step for each axis.

    With m = ``microbatches``, A = microbatch_size × sequence × hidden × bytes_per_element (one activation) and
    S = stage_parameters × bytes_per_element (what one rank holds of its stage, after the tensor cut):

    - tp: 4 all-reduces of A per layer and microbatch (2 forward, 2 backward), each 2 (T−1)/T A in a ring:
      4 × layers_per_stage × m × 2 (T−1)/T × A.
    - pp: one activation per boundary, microbatch and direction: m × A (0 without a pipeline).
    - dp: a reduce-scatter and an all-gather each send (D−1)/D S in a ring. ZeRO-0/1: one of each; ZeRO-2: a
      reduce-scatter per microbatch and one all-gather; ZeRO-3: a reduce-scatter and two all-gathers (forward and
      backward) per microbatch. ``backend`` may make more of a reduce-scatter of ZeRO-1 to 3.
    """
    activation = microbatch_size * sequence * hidden * bytes_per_element
    stage = stage_parameters * bytes_per_element
    scatter = backend.reduce_scatter
    collectives = {0: 2, 1: scatter + 1, 2: scatter * microbatches + 1, 3: (scatter + 2) * microbatches}[zero]
    t, d = degrees.tensor, degrees.data
    return Traffic(
        tp=4 * layers_per_stage * microbatches * 2 * (t - 1) / t * activation,
        pp=float(microbatches * activation) if degrees.pipeline > 1 else 0.0,
        dp=collectives * (d - 1) / d * stage,
    )


def node_loads(placement: Placement, traffic: Traffic) -> tuple[Traffic, ...]:
    """Bytes per axis that leave each node in one optimizer step."""
    loads = unit_loads(placement, traffic, [place.node for place in placement.ranks])
    return tuple(loads[node] for node in range(placement.nodes))


def unit_loads(placement: Placement, traffic: Traffic, unit_of: Sequence[Unit]) -> dict[Unit, Traffic]:
    """Bytes per axis that leave each unit (a node, a leaf switch) in one step; ``unit_of`` names that of every rank."""
    edges = _edges_out(placement, unit_of)
    return {unit: _load(traffic, **{axis: sum(edges[axis, stage, unit] for stage in range(placement.degrees.pipeline))
                                    for axis in AXES})
            for unit in dict.fromkeys(unit_of)}


def node_edges(placement: Placement) -> Counter[tuple[str, int, int]]:
    """How many messages' ways lead from node to node, by (axis, sender, receiver)."""
    node = [place.node for place in placement.ranks]
    return Counter((axis, node[a], node[b]) for axis, edges in AXES.items()
                   for group in placement.groups[axis] for a, b in edges(group) if node[a] != node[b])


def flows(placement: Placement, traffic: Traffic) -> dict[tuple[int, int], Traffic]:
    """Bytes per axis that one node sends another in one optimizer step, by (sender, receiver)."""
    counts = node_edges(placement)
    return {(a, b): _load(traffic, **{axis: counts[axis, a, b] for axis in AXES})
            for a, b in dict.fromkeys((a, b) for _, a, b in counts)}


def busiest_link(placement: Placement, traffic: Traffic) -> float:
    """Bytes that leave the busiest node in one optimizer step."""
    return max(load.total for load in node_loads(placement, traffic))


def choose_order(
    degrees: Degrees, traffic: Traffic, ranks_per_node: int, bandwidth: float = DEFAULT_BANDWIDTH,
    rank_map: RankMap = "block", stages_in_turn: bool = False,
) -> tuple[str, list[OrderCost]]:
    """The order in which a step waits least for the links between nodes, and the cost of every order.

    ``bandwidth`` is in bytes per second; ``stages_in_turn`` tells whether stages use the links for the data axis one
    after another. Costs stand in the order of ``ORDERS``; of equal ones the first wins, so that ties go to DPT.
    Latency, overlap with computing and the context axis are not counted.
    """
    costs = []
    for order in ORDERS:
        placement = place(degrees, order, ranks_per_node, rank_map)
        loads = node_loads(placement, traffic)
        node = max(range(len(loads)), key=lambda node: loads[node].total)
        waited = _waited_in_turn(placement, traffic) if stages_in_turn else loads[node].total
        costs.append(OrderCost(placement.order, node, loads[node], waited, waited / bandwidth))
    return min(costs, key=lambda cost: cost.seconds).order, costs


def _waited_in_turn(placement: Placement, traffic: Traffic) -> float:
    node = [place.node for place in placement.ranks]
    edges, nodes, stages = _edges_out(placement, node), range(placement.nodes), range(placement.degrees.pipeline)
    together = [_load(traffic, **{axis: sum(edges[axis, stage, n] for stage in stages) for axis in ("tp", "pp")}).total
                for n in nodes]
    turns = [max(_load(traffic, dp=edges["dp", stage, n]).total for n in nodes) for stage in stages]
    return max(together) + sum(turns)


def _edges_out(placement: Placement, unit_of: Sequence[Unit]) -> Counter[tuple[str, int, Unit]]:
    """How many messages' ways lead out of each unit, by (axis, sender's stage, unit)."""
    out: Counter[tuple[str, int, Unit]] = Counter()
    for axis, edges in AXES.items():
        for group in placement.groups[axis]:
            for sender, receiver in edges(group):
                if unit_of[sender] != unit_of[receiver]:
                    out[axis, placement.ranks[sender].pp, unit_of[sender]] += 1
    return out


def _load(traffic: Traffic, tp: int = 0, pp: int = 0, dp: int = 0) -> Traffic:
    """Edges are counted before they are multiplied: equal counts then give equal bytes, and ties stay ties."""
    return Traffic(tp * traffic.tp, pp * traffic.pp, dp * traffic.dp)


def _ring(group: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Every rank sends to the next, the last to the first."""
    return zip(group, group[1:] + group[:1], strict=True)


def _chain(group: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Every stage sends activations to the next one and gradients to the one before."""
    for a, b in pairwise(group):
        yield a, b
        yield b, a


AXES = {"tp": _ring, "pp": _chain, "dp": _ring}
