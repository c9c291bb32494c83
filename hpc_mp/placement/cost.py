"""What a placement costs: nodes a group spans, and the bytes that leave the busiest node in one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from hpc_mp.placement.grid import ORDERS, Degrees, Groups, Placement, place

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
class OrderCost:
    """One order: its busiest node, the bytes per axis that leave it, and the time they take on its link."""

    order: str
    node: int
    load: Traffic
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
) -> Traffic:
    """Bytes per optimizer step for each axis.

    With m = ``microbatches``, A = microbatch_size × sequence × hidden × bytes_per_element (one activation) and
    S = stage_parameters × bytes_per_element (what one rank holds of its stage, after the tensor cut):

    - tp: 4 all-reduces of A per layer and microbatch (2 forward, 2 backward), each 2 (T−1)/T A in a ring:
      4 × layers_per_stage × m × 2 (T−1)/T × A.
    - pp: one activation per boundary, microbatch and direction: m × A (0 without a pipeline).
    - dp: a reduce-scatter and an all-gather each send (D−1)/D S in a ring. ZeRO-0/1: one of each; ZeRO-2: a
      reduce-scatter per microbatch and one all-gather; ZeRO-3: a reduce-scatter and two all-gathers (forward and
      backward) per microbatch.
    """
    activation = microbatch_size * sequence * hidden * bytes_per_element
    stage = stage_parameters * bytes_per_element
    collectives = {0: 2, 1: 2, 2: microbatches + 1, 3: 3 * microbatches}[zero]
    t, d = degrees.tensor, degrees.data
    return Traffic(
        tp=4 * layers_per_stage * microbatches * 2 * (t - 1) / t * activation,
        pp=float(microbatches * activation) if degrees.pipeline > 1 else 0.0,
        dp=collectives * (d - 1) / d * stage,
    )


def node_loads(placement: Placement, traffic: Traffic) -> tuple[Traffic, ...]:
    """Bytes per axis that leave each node in one optimizer step."""
    node = [place.node for place in placement.ranks]
    # Edges are counted before they are multiplied: equal counts then give equal bytes, and ties stay ties.
    out = [{"tp": 0, "pp": 0, "dp": 0} for _ in range(placement.nodes)]
    for axis, edges in (("tp", _ring), ("dp", _ring), ("pp", _chain)):
        for group in placement.groups[axis]:
            for sender, receiver in edges(group):
                out[node[sender]][axis] += node[sender] != node[receiver]
    return tuple(Traffic(n["tp"] * traffic.tp, n["pp"] * traffic.pp, n["dp"] * traffic.dp) for n in out)


def busiest_link(placement: Placement, traffic: Traffic) -> float:
    """Bytes that leave the busiest node in one optimizer step."""
    return max(load.total for load in node_loads(placement, traffic))


def choose_order(
    degrees: Degrees, traffic: Traffic, ranks_per_node: int, bandwidth: float = DEFAULT_BANDWIDTH
) -> tuple[str, list[OrderCost]]:
    """The order with the least time on the busiest node's outgoing link, and the cost of every order.

    ``bandwidth`` is in bytes per second. Costs stand in the order of ``ORDERS``; of equal ones the first wins, so that
    ties go to DPT. Latency, overlap with computing and the context axis are not counted.
    """
    costs = [_order_cost(place(degrees, order, ranks_per_node), traffic, bandwidth) for order in ORDERS]
    return min(costs, key=lambda cost: cost.seconds).order, costs


def _order_cost(placement: Placement, traffic: Traffic, bandwidth: float) -> OrderCost:
    node, load = max(enumerate(node_loads(placement, traffic)), key=lambda item: item[1].total)
    return OrderCost(placement.order, node, load, load.total / bandwidth)


def _ring(group: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Every rank sends to the next, the last to the first."""
    return zip(group, group[1:] + group[:1], strict=True)


def _chain(group: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Every stage sends activations to the next one and gradients to the one before."""
    for a, b in pairwise(group):
        yield a, b
        yield b, a
