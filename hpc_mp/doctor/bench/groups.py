"""Groups of ranks that exchange data: all ranks, the ranks of a node, of a rail, or of an axis of a layout."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.placement import Degrees, place

Groups = tuple[tuple[int, ...], ...]

# As in NCCL_TESTS_SPLIT: ranks with equal results are one group.
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "AND": operator.and_, "&": operator.and_, "OR": operator.or_, "|": operator.or_,
    "MOD": operator.mod, "%": operator.mod, "DIV": operator.floordiv, "/": operator.floordiv,
}
_SPLIT = re.compile(r"(AND|OR|MOD|DIV|[&|%/])\s*:?\s*(0x[0-9a-f]+|0b[01]+|\d+)", re.IGNORECASE)


def split(world: int, ranks_per_node: int, how: str) -> Groups:
    """Split all ranks into groups, each ascending. Raises HpcMpError for an unknown ``how``.

    ``how`` is ``all``, ``node``, ``rail`` (ranks of the same local rank, one per node), or the syntax of nccl-tests'
    NCCL_TESTS_SPLIT: ``MOD 8``, ``DIV 8``, ``AND 0x7``, ``OR 7``.
    """
    named = {"all": f"DIV {world}", "node": f"DIV {ranks_per_node}", "rail": f"MOD {ranks_per_node}"}
    match = _SPLIT.fullmatch(named.get(how, how).strip())
    if match is None:
        raise HpcMpError(f"--split {how!r}", "must be all, node, rail or as in NCCL_TESTS_SPLIT", 'write for example "MOD 8"')
    operation, value = OPERATIONS[match[1].upper()], int(match[2], 0)
    if value == 0 and operation in (operator.mod, operator.floordiv):
        raise HpcMpError(f"--split {how!r}", "divides by 0", "divide by 1 or more")
    groups: dict[int, list[int]] = {}
    for rank in range(world):
        groups.setdefault(operation(rank, value), []).append(rank)
    return tuple(map(tuple, groups.values()))


def along(axis: str, degrees: Degrees, order: str, ranks_per_node: int) -> Groups:
    """Return the groups in which a job of this layout communicates along ``axis``. Raises HpcMpError if it has no such axis."""
    groups = place(degrees, order, ranks_per_node).groups
    if axis not in groups:
        raise HpcMpError(f"--axis {axis}", f"is none of this layout's: {', '.join(groups)}", "name one of them")
    return groups[axis]


def nodes_of(group: tuple[int, ...], ranks_per_node: int) -> int:
    """Return the number of nodes of a group if ranks fill node after node."""
    return len({rank // ranks_per_node for rank in group})
