"""Axes → ranks: letter orders, groups, what a placement costs, and its picture. Pure Python."""

from hpc_mp.layout.placement.cost import (
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
from hpc_mp.layout.placement.grid import (
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
    "busiest_link",
    "choose_order",
    "flows",
    "from_dict",
    "normalize_order",
    "place",
    "spans",
    "to_dict",
    "traffic",
]
