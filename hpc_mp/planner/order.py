"""The letter order of a job's ranks, with the reason: the order in which a step waits least for links between nodes."""

from collections.abc import Callable
from dataclasses import dataclass

from hpc_mp.base.text import data_rate, data_size, duration
from hpc_mp.cluster.bandwidth import LinkRates
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.placement import ORDERS, ORDERS_WITH_CONTEXT, Degrees, RankMap, normalize_order, place
from hpc_mp.planner.links import node_loads
from hpc_mp.rundir.plan import Traffic

DEFAULT_BANDWIDTH = 25e9
"""Bytes per second out of a node: one 200 Gb/s port. It scales all orders alike and so never changes the choice."""


@dataclass(frozen=True, slots=True)
class OrderCost:
    """The cost of one order: its busiest node, the bytes per axis that leave it in a step, and the bytes and seconds waited.
    ``waited`` is the busiest node's load: reductions run beside the backwards, so that stages use the links concurrently."""

    order: str
    node: int
    load: Traffic
    waited: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The chosen letters, the reason, and the seconds per step that ranks wait for links between nodes, if known."""

    letters: str
    why: str
    seconds: float | None = None


def choose_rank_order(layout: Layout, traffic: Traffic, measured: LinkRates | None = None,
                      step: Callable[[str], float] | None = None) -> RankOrder:
    """Return the order of a layout; for "auto" the order in which a step waits least. ``traffic``: traffic of the job.
    ``measured``: the doctor's measurement of this cluster; the median rate counts, because the nodes are not known yet. ``step``:
    predicted seconds of a step in an order; "auto" is then the order with the least."""
    if layout.order != "auto":
        return RankOrder(normalize_order(layout.order, layout.degrees.context), f"parallel.order = {layout.order}")
    usual = measured.usual if measured is not None and measured.recent() else None
    order, costs = cheapest_order(layout.degrees, traffic, layout.ranks_per_node,
                                  DEFAULT_BANDWIDTH if usual is None else usual * 1e9, rank_map=layout.rank_map)
    if layout.nodes == 1:
        return RankOrder(order, "one node: no traffic leaves it")
    if step is not None:
        steps = {cost.order: float(f"{step(cost.order):.3e}") for cost in costs}
        order = min(steps, key=steps.__getitem__)
        waits = {cost.order: cost.seconds for cost in costs} if usual is not None else {}
        why = f"a step takes {duration(steps[order])}, in the worst order {duration(max(steps.values()))}"
        return RankOrder(order, why, waits.get(order))
    waited = [cost.waited for cost in costs]
    reason = f"a step waits for {data_size(min(waited))} on links between nodes, in the worst order {data_size(max(waited))}"
    if measured is None or usual is None:
        return RankOrder(order, reason)
    seconds = min(cost.seconds for cost in costs)
    return RankOrder(order, f"{reason}; {duration(seconds)} at the {data_rate(usual)} measured {measured.when()}", seconds)


def cheapest_order(degrees: Degrees, traffic: Traffic, ranks_per_node: int, bandwidth: float = DEFAULT_BANDWIDTH,
                   rank_map: RankMap = "block") -> tuple[str, list[OrderCost]]:
    """Return the order in which a step waits least for the links between nodes, and the cost of every order. ``bandwidth`` is in
    bytes per second. Costs are in the order of ``ORDERS``, or with a context axis of ``ORDERS_WITH_CONTEXT``; of equal ones the
    first wins: ties go to DPT, or DPCT. Latency and overlap with computation are not counted."""
    costs = []
    for order in ORDERS if degrees.context == 1 else ORDERS_WITH_CONTEXT:
        placement = place(degrees, order, ranks_per_node, rank_map)
        loads = node_loads(placement, traffic)
        node = max(range(len(loads)), key=lambda node: loads[node].total)
        costs.append(OrderCost(placement.order, node, loads[node], loads[node].total, loads[node].total / bandwidth))
    return min(costs, key=lambda cost: cost.seconds).order, costs

