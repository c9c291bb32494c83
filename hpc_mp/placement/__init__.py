"""Axes → ranks: letter orders, groups, what a placement costs, and its picture. Pure Python."""

from hpc_mp.placement.cost import (
    GLOO,
    NCCL,
    Backend,
    OrderCost,
    Span,
    Traffic,
    busiest_link,
    choose_order,
    flows,
    spans,
    traffic,
)
from hpc_mp.placement.grid import (
    ORDERS,
    Degrees,
    Placement,
    RankMap,
    RankPlace,
    from_dict,
    normalize_order,
    place,
    to_dict,
)
from hpc_mp.placement.hosts import best_hosts, foreseen, host_words, hosts_cost, leaves, rate_words, uplinks
from hpc_mp.placement.times import step_times

__all__ = [
    "GLOO",
    "NCCL",
    "ORDERS",
    "Backend",
    "Degrees",
    "OrderCost",
    "Placement",
    "RankMap",
    "RankPlace",
    "Span",
    "Traffic",
    "best_hosts",
    "busiest_link",
    "choose_order",
    "flows",
    "foreseen",
    "from_dict",
    "host_words",
    "hosts_cost",
    "leaves",
    "normalize_order",
    "place",
    "rate_words",
    "spans",
    "step_times",
    "to_dict",
    "traffic",
    "uplinks",
]
