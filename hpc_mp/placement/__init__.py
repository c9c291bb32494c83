"""Axes → ranks: letter orders, groups, what a placement costs, and its picture. Pure Python."""

from hpc_mp.placement.cost import OrderCost, Span, Traffic, busiest_link, choose_order, spans, traffic
from hpc_mp.placement.grid import (
    ORDERS,
    Degrees,
    Placement,
    RankPlace,
    from_dict,
    normalize_order,
    place,
    to_dict,
)

__all__ = [
    "ORDERS",
    "Degrees",
    "OrderCost",
    "Placement",
    "RankPlace",
    "Span",
    "Traffic",
    "busiest_link",
    "choose_order",
    "from_dict",
    "normalize_order",
    "place",
    "spans",
    "to_dict",
    "traffic",
]
