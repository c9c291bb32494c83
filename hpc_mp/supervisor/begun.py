"""Records that ranks of our own engine write about themselves; for the ranks of a program the supervisor writes them."""

import time
from collections.abc import Sequence
from contextlib import suppress

from hpc_mp.layout.placement import RankPlace
from hpc_mp.rundir import LineFile, RunDirectory
from hpc_mp.rundir.records import RankStart, RankStatus, line_of, write_record


def say_begun(run: RunDirectory, attempt: int, places: Sequence[RankPlace], hosts: Sequence[str], device: str,
              token: str = "", began: float | None = None) -> None:
    """Write a line for every rank to ``ranks.jsonl``, and their phase. ``hosts``: host of each node of the places. Tasks are
    distributed to them in blocks. ``began``: unix seconds; None: now."""
    seats = sorted(places, key=lambda place: (place.node, place.local_rank))
    tasks = {place.rank: task for task, place in enumerate(seats)}
    file = LineFile(run.ranks, limit=len(places))
    for place in places:
        host = hosts[place.node]
        file.write(line_of(RankStart(attempt, place.rank, host, host, began or time.time(), local_rank=place.local_rank,
                                     dp=place.dp, token=token, device=device, task=tasks[place.rank])))
    file.close()
    say_phase(run, attempt, "running")


def say_ended(run: RunDirectory, attempt: int, state: str) -> None:
    """Write the end of the attempt, as a rank 0 of our own engine does."""
    say_phase(run, attempt, "done" if state == "completed" else state)


def say_phase(run: RunDirectory, attempt: int, phase: str, detail: str = "") -> None:
    """Write the phase of the attempt, as a rank 0 of our own engine does."""
    with suppress(OSError):  # a full disk must not stop a program
        write_record(run.status, RankStatus(attempt, phase, detail, time=time.time()))
