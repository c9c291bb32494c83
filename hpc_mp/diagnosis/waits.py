"""Wait chains: what each stalled rank waits for, and the rank at the end of all chains.

A rank that cannot write (stopped, killed, crashed, stuck in native code) is found through the others. Each rank counts the
messages that it has reached on every channel and notes the message that it waits in; a stalled rank records both. If a rank has
not reached a message that another rank waits in, that rank waits for it, as in NCCL's flight recorder. The rank at the end of
the chain waits for no rank or no longer writes. It is the cause of the stall, and all others are its echoes.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from hpc_mp.rundir.standings import Standing

LATE_PERIODS = 5  # periods without a record after which a stalled rank counts as silent ...
SLACK_S = 5.0  # ... and additional seconds: clocks of nodes differ, and a busy machine is slow
HELD_SLACK_S = 2.0  # the same, with one period, for a rank in a message that all have reached and that does not end


@dataclass(frozen=True, slots=True)
class Awaited:
    """The rank at the end of the chains, and the other ranks that wait for it. ``silent``: its record is missing or overdue."""

    rank: int
    by: tuple[int, ...]
    silent: bool = field(default=False, compare=False)


def awaited(standings: Iterable[Standing], ranks: Collection[int]) -> Awaited | None:
    """Return the rank that most others ultimately wait for; None if no rank waits for another. ``standings``: the last record of
    each rank that has written one. ``ranks``: all participating ranks."""
    latest = _living(_spoke({standing.rank: standing for standing in standings}))
    waits = {rank: _missed(latest[rank], latest) if rank in latest else () for rank in ranks}
    reached = {rank: _reached(rank, waits) for rank in ranks}
    by = {rank: tuple(other for other in ranks if rank != other and rank in reached[other]) for rank in ranks}
    ends = [rank for rank in ranks if by[rank] and not waits[rank]]
    loops = [rank for rank in ranks if by[rank] and rank in reached[rank]]  # they wait for each other: the first that stalled

    def order(rank: int) -> tuple[int, bool, float, int]:
        standing = latest.get(rank)
        return -len(by[rank]), standing is not None and standing.wait is not None, standing.since if standing else 0.0, rank

    end = min(ends or loops, key=order, default=None)
    return None if end is None else Awaited(end, by[end], end not in latest)


def _spoke(standings: Mapping[int, Standing]) -> dict[int, Standing]:
    """Return the records without overdue ones: the ranks of overdue records are silent."""
    newest = max((standing.time for standing in standings.values()), default=0.0)
    return {rank: standing for rank, standing in standings.items()
            if not standing.period or newest - standing.time <= LATE_PERIODS * standing.period + SLACK_S}


def _living(standings: Mapping[int, Standing]) -> dict[int, Standing]:
    """Return the records without those of ranks that were stopped in a message: all have reached it, others stand in it too, and
    the record was not written again in time."""
    newest = max((standing.time for standing in standings.values()), default=0.0)
    messages = Counter((standing.wait.channel, standing.wait.number) for standing in standings.values() if standing.wait)

    def stopped(standing: Standing) -> bool:
        late = standing.period > 0 and newest - standing.time > standing.period + HELD_SLACK_S
        held = standing.wait is not None and messages[standing.wait.channel, standing.wait.number] > 1
        return late and held and not _missed(standing, standings)

    return {rank: standing for rank, standing in standings.items() if not stopped(standing)}


def _missed(standing: Standing, standings: Mapping[int, Standing]) -> tuple[int, ...]:
    """Return the ranks that have not reached the message that this rank waits in."""
    wait = standing.wait
    if wait is None:
        return ()
    return tuple(rank for rank in wait.ranks if rank != standing.rank and (
        rank not in standings or standings[rank].passed.get(wait.channel, 0) < wait.number))


def _reached(rank: int, waits: Mapping[int, Collection[int]]) -> set[int]:
    """Return all ranks that a rank waits for, directly or through others; itself only if they wait for each other."""
    reached: set[int] = set()
    todo = list(waits[rank])
    while todo:
        if (other := todo.pop()) not in reached:
            reached.add(other)
            todo += waits.get(other, ())
    return reached
