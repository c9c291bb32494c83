"""The rank numbering of the user's programs, and the nodes of these numbers that put their groups where an order wants them.

A program makes its groups only from rank numbers, by its own rule. The launcher chooses which number a process gets: with the
right numbers the groups are inside nodes or across them as in any other order.
"""

from hpc_mp.base.programs import NUMBERINGS
from hpc_mp.layout.placement.grid import Degrees, Placement, RankMap, RankPlace, normalize_order, place

AS_NUMBERED = "auto"  # the order of a program that is laid out by its own numbering


def letters_of(numbering: str, context: int = 1) -> str:
    """Return the letters of a program by name, or the given letters; C only with context ranks. Raises HpcMpError for others."""
    letters = normalize_order(NUMBERINGS.get(numbering, numbering), context)
    return letters if context > 1 else letters.replace("C", "")


def numbered(degrees: Degrees, numbering: str, order: str, ranks_per_node: int, rank_map: RankMap = "auto") -> Placement:
    """Return the ranks as a program numbers them, on the nodes where an order would have ranks of their coordinates. Raises
    HpcMpError for the reasons of ``place``. ``numbering``: a key of ``NUMBERINGS``, or letters. ``order``: letters, ``cluster``,
    ``spread``, or ``auto``: by the numbering. ``rank_map``: as in ``place``, of the ranks in that order; a tuple names the node
    of each rank of the program."""
    own = letters_of(numbering, degrees.context)
    if order == AS_NUMBERED or isinstance(rank_map, tuple):
        return place(degrees, own, ranks_per_node, rank_map)
    node = {_coordinates(seat): seat.node for seat in place(degrees, order, ranks_per_node, rank_map).ranks}
    nodes = tuple(node[_coordinates(rank)] for rank in place(degrees, own, ranks_per_node).ranks)
    plain = place(degrees, own, ranks_per_node, rank_map)
    return plain if nodes == tuple(rank.node for rank in plain.ranks) else place(degrees, own, ranks_per_node, nodes)


def _coordinates(rank: RankPlace) -> tuple[int, ...]:
    return rank.dp, rank.pp, rank.cp, rank.tp
