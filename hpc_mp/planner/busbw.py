"""The operations that are measured, with the counts and the formulas of nccl-tests.

Sources: nccl-tests 2.19.6, ``doc/PERFORMANCE.md`` (bandwidths) and ``src/*.cu`` (counts, columns of the table). A size S is
that of the whole array: what all ranks together hold for all-gather, reduce-scatter and all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hpc_mp.base.errors import HpcMpError

ALIGN = 16  # bytes: a rank's part is a whole number of these

Placed = Literal["out_of_place", "in_place"]
PLACED: tuple[Placed, Placed] = ("out_of_place", "in_place")


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements of one operation in a group.

    ``param`` is what the library is given, the table's ``count``; ``total`` the whole array, whose bytes are the ``size``.
    """

    param: int
    total: int
    send: int
    receive: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation.

    Attributes:
        program: of nccl-tests.
        reduces: it adds what ranks send.
        rooted: rank 0 of the group is its root.
        parts: whether each rank (``each``) sends or receives a part of the array, or all of it.
        factor: busbw / algbw for n ranks: the share of the array that the busiest link has to carry.
        checked: placements whose data are compared; the others are timed only, as nccl-tests does.
        native: how libraries offer it. torch reduces and broadcasts in place: out of place it has to copy first.
    """

    name: str
    program: str
    reduces: bool
    rooted: bool
    send_part: bool
    receive_part: bool
    split: bool
    factor: Callable[[int], float]
    checked: tuple[Placed, ...] = PLACED
    native: Placed = "out_of_place"

    def counts(self, size: int, ranks: int, element: int) -> Counts:
        """For at most ``size`` bytes of elements of ``element`` bytes."""
        total = size // element
        if not self.split:
            return Counts(total, total, total, total)
        part = (total // ranks) & ~(ALIGN // element - 1)
        total = part * ranks
        return Counts(part, total, part if self.send_part else total, part if self.receive_part else total)

    def bandwidths(self, size: int, seconds: float, ranks: int) -> tuple[float, float]:
        """algbw and busbw in GB/s (10⁹) of an operation on ``size`` bytes; 0 for one that took no time."""
        algorithm = size / seconds / 1e9 if seconds > 0 else 0.0
        return algorithm, algorithm * self.factor(ranks)


def _reduced(n: int) -> float:
    return 2 * (n - 1) / n


def _shared(n: int) -> float:
    return (n - 1) / n


def _whole(n: int) -> float:
    return 1.0


COLLECTIVES: dict[str, Collective] = {each.name: each for each in (
    Collective("all_reduce", "all_reduce_perf", True, False, False, False, False, _reduced, native="in_place"),
    Collective("all_gather", "all_gather_perf", False, False, True, False, True, _shared),
    Collective("reduce_scatter", "reduce_scatter_perf", True, False, False, True, True, _shared),
    Collective("all_to_all", "alltoall_perf", False, False, False, False, True, _shared, ("out_of_place",)),
    Collective("broadcast", "broadcast_perf", False, True, False, False, False, _whole, native="in_place"),
    Collective("sendrecv", "sendrecv_perf", False, False, False, False, False, _whole, ("out_of_place",)),
)}


def collective(name: str) -> Collective:
    """Raises HpcMpError for a name that is none of ``COLLECTIVES``."""
    if name not in COLLECTIVES:
        raise HpcMpError(f"collective {name!r}", f"must be {', '.join(COLLECTIVES)}", "name one of them")
    return COLLECTIVES[name]
