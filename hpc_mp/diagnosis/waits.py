"""Who waits for whom: what each rank that stands still waits for, and the rank that all of them wait for in the end.

A rank that cannot write (stopped, killed, crashed, stuck in native code) is found by the others. Each rank counts the messages
that it has come to on every channel and notes the one that it waits in; a rank that stands still writes that down. Whoever has
not come to a message that another one waits in is waited for, as in NCCL's flight recorder; the one at the end of such a chain,
who waits for nobody or writes nothing any more, is the cause of the stand, and all others are its echoes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from hpc_mp.rundir.standings import Standing

LATE_PERIODS = 5  # periods without a word after which a rank that stood still is silent ...
SLACK_S = 5.0  # ... and so many seconds more: clocks of nodes differ, and a full machine is slow


@dataclass(frozen=True, slots=True)
class Awaited:
    """The rank at the end of the chains, and those that wait for it, itself not among them."""

    rank: int
    by: tuple[int, ...]


def awaited(standings: Iterable[Standing], ranks: Collection[int]) -> Awaited | None:
    """The rank that most others wait for in the end; None when nobody waits for anybody.

    Args:
        standings: the last of each rank that has written one.
        ranks: all that take part.
    """
    known = _spoke({standing.rank: standing for standing in standings})
    waits = {rank: _missed(known[rank], known) if rank in known else () for rank in ranks}
    reached = {rank: _reached(rank, waits) for rank in ranks}
    by = {rank: tuple(other for other in ranks if rank != other and rank in reached[other]) for rank in ranks}
    ends = [rank for rank in ranks if by[rank] and not waits[rank]]
    loops = [rank for rank in ranks if by[rank] and rank in reached[rank]]  # they wait for each other: whoever stood first

    def order(rank: int) -> tuple[int, bool, float, int]:
        standing = known.get(rank)
        return -len(by[rank]), standing is not None and standing.wait is not None, standing.since if standing else 0.0, rank

    found = min(ends or loops, key=order, default=None)
    return None if found is None else Awaited(found, by[found])


def _spoke(standings: Mapping[int, Standing]) -> dict[int, Standing]:
    """Without those who would have written again since: they are silent, whatever they said before."""
    newest = max((standing.time for standing in standings.values()), default=0.0)
    return {rank: standing for rank, standing in standings.items()
            if not standing.period or newest - standing.time <= LATE_PERIODS * standing.period + SLACK_S}


def _missed(standing: Standing, known: Mapping[int, Standing]) -> tuple[int, ...]:
    """The ranks that have not come to the message that this one waits in."""
    wait = standing.wait
    if wait is None:
        return ()
    return tuple(rank for rank in wait.ranks if rank != standing.rank and (
        rank not in known or known[rank].passed.get(wait.channel, 0) < wait.number))


def _reached(rank: int, waits: Mapping[int, Collection[int]]) -> set[int]:
    """All that a rank waits for, over others too; itself only when they wait for each other."""
    found: set[int] = set()
    todo = list(waits[rank])
    while todo:
        if (other := todo.pop()) not in found:
            found.add(other)
            todo += waits.get(other, ())
    return found
