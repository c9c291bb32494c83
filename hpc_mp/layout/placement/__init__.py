"""Axes → ranks: letter orders, groups, the reach of groups. Pure Python."""

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
from hpc_mp.layout.placement.numbering import letters_of, numbered

__all__ = [
    "ORDERS", "ORDERS_WITH_CONTEXT", "Degrees", "Placement", "RankMap", "RankPlace", "Reach", "from_dict",
    "letters_of", "normalize_order", "numbered", "place", "reach_of", "to_dict",
]
