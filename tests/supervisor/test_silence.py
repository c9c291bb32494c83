"""Silence: when it is a hang, who fell silent first, and whose lines stand in which file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import create_run
from hpc_mp.supervisor.silence import SilenceWatch, node_files, rank_files


class Clock:
    """Seconds as a test wants them, and ranks that print then."""

    def __init__(self, spoken: dict[float, Collection[int]]) -> None:
        self.now, self.spoken = 0.0, spoken

    def __call__(self) -> float:
        return self.now

    def speakers(self) -> Collection[int]:
        return self.spoken.get(self.now, ())


@pytest.mark.parametrize(("spoken", "ranks", "limit", "at", "first"), [
    ({}, 2, 10, 10, None),
    ({}, 1, 10, 10, 0),
    ({5: [0]}, 2, 10, 15, None),
    ({2: [1], 8: [0]}, 2, 10, 18, 1),
    ({2: [0, 1], 4: [0]}, 2, 10, 14, None),
    ({2: [0, 1, 2], 9: [0, 2]}, 3, 10, 19, 1),
    ({2: [0, 1, 2], 9: [0]}, 3, 10, 19, None),
    ({}, 2, 0, None, None),
    ({1: [0], 9: [0], 18: [0], 27: [0], 36: [0], 45: [0], 54: [0], 60: [0]}, 1, 10, None, None),
])
def test_a_hang(spoken: dict[float, list[int]], ranks: int, limit: float, at: float | None, first: int | None) -> None:
    clock = Clock(dict(spoken))
    watch = SilenceWatch(limit, ranks, clock.speakers, clock)
    noticed = None
    for second in range(61):
        clock.now = float(second)
        if watch.noticed() and noticed is None:
            noticed = second
    assert noticed == at
    assert (watch.hang.rank if watch.hang else None) == first
    if watch.hang is not None:
        assert "no rank has printed a line for 10 s (program.silent_limit)" in str(watch.hang)


@pytest.mark.parametrize(("limit", "spoke", "resumed"), [(30, 5, 620), (30, 18, 31), (6, 18, 28), (8, 15, 24)])
def test_a_job_that_was_suspended_has_not_been_silent(limit: int, spoke: int, resumed: int) -> None:
    """Slurm stops the supervisor as it stops the ranks: nobody asks in that time."""
    clock = Clock({spoke - 5: [0, 1], spoke: [0, 1]})
    watch = SilenceWatch(limit, 2, clock.speakers, clock)
    noticed = []
    for second in (*range(spoke - 5, 20), *range(resumed, resumed + 40)):
        clock.now = float(second)
        if watch.noticed():
            noticed.append(second)
    assert noticed[0] == resumed + limit - (19 - spoke), "the seconds before it count"


def test_whose_file_has_grown(tmp_path: Path) -> None:
    run = create_run(tmp_path, "x")
    grown = rank_files(run, 3)
    assert list(grown()) == []
    run.rank_log(1).write_text("x")
    assert list(grown()) == [1] and list(grown()) == []
    run.rank_log(1).write_text("x, half a line")
    run.rank_log(2).write_text("")
    assert list(grown()) == [1]


def test_whose_lines_stand_in_the_files_of_nodes(tmp_path: Path) -> None:
    run = create_run(tmp_path, "x")
    spoken = node_files(run, place(Degrees(data=4), "cluster", 2), ("n1", "n2"))
    assert list(spoken()) == []
    run.node_log("n2").write_text("2: begins\nsrun: no rank's\n3: half")
    assert sorted(spoken()) == [2]
    run.node_log("n2").write_text("2: begins\nsrun: no rank's\n3: half a line\n")
    assert sorted(spoken()) == [3]
