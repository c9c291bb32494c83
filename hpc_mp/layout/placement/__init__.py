"""Axes → ranks: letter orders, groups, how far groups reach. Pure Python."""

from hpc_mp.layout.placement.grid import (
    ORDERS,
    ORDERS_WITH_CONTEXT,
    Degrees,
    Placement,
    RankMap,
    RankPlace,
    Reach,
    from_dict,
    normalize_order,
    place,
    reach_of,
    to_dict,
)

__all__ = [
    "ORDERS", "ORDERS_WITH_CONTEXT", "Degrees", "Placement", "RankMap", "RankPlace", "Reach", "from_dict", "normalize_order",
    "place", "reach_of", "to_dict",
]
