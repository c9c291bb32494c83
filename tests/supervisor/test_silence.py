"""Silence: when it is a hang, who fell silent first, and whose lines stand in which file."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import RunDirectory, create_run
from hpc_mp.supervisor.silence import TROUBLED_S, NodeLogs, SilenceWatch, rank_files


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


@pytest.mark.parametrize(("spoken", "limit", "troubled", "at"), [
    ({}, 3600, True, TROUBLED_S), ({}, 3600, False, None), ({}, 0, True, None), ({}, 50, True, 50), ({5: [0]}, 3600, True, None)])
def test_ranks_that_may_never_begin_have_less_time(spoken: dict[float, list[int]], limit: float, troubled: bool,
                                                   at: float | None) -> None:
    clock = Clock(dict(spoken))
    watch = SilenceWatch(limit, 4, clock.speakers, clock, troubled=lambda: troubled)
    noticed = []
    for second in range(0, 900, 5):
        clock.now = float(second)
        noticed += [clock.now] if watch.noticed() else []
    assert (noticed or [None])[0] == at


@pytest.mark.parametrize(("line", "troubled", "ranks"), [
    ("0: slurmstepd-n1: error:  mpi/pmix_v4: pmixp_coll_belong_chk: n1 [0]: x.c:280: No process controlled by this", True, []),
    ("0: [2026-09-10T10:08:16.944] error:  mpi/pmix_v4: _process_server_request: n1 [0]: x.c:935: unexpected contrib", True, []),
    ("0: slurmstepd: error: mpi/pmi2: failed to send temp kvs to compute nodes", True, []),
    ("0: slurmstepd: error: mpi/pmi2: no value for key hwloc in req", False, [0]),
    ("0: slurmstepd: error: mpi/pmi2: value not properly terminated in client request", False, [0]),
    ("0: training begins", False, [0])])
def test_complaints_of_slurms_plug_in_are_no_words_of_a_rank(tmp_path: Path, line: str, troubled: bool, ranks: list[int]) -> None:
    run = create_run(tmp_path, "x")
    spoken = NodeLogs(run, place(Degrees(data=4), "cluster", 2), ("n1", "n2"))
    run.node_log("n1").write_text(f"{line}\n")
    assert (spoken(), spoken.troubled) == (ranks, troubled)


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


@pytest.mark.parametrize("kind", [
    lambda run: rank_files(run, 2), lambda run: NodeLogs(run, place(Degrees(data=2), "cluster", 2), ("n1", "n2"))])
def test_a_step_that_is_logged_is_a_sign_of_rank_0(tmp_path: Path, kind: Callable[[RunDirectory], Callable[[], Any]]) -> None:
    """Ranks that printed nothing were ended as hung in the midst of their steps."""
    run = create_run(tmp_path, "x")
    run.metrics.write_text("{}\n")  # of an earlier attempt
    speakers = kind(run)
    assert list(speakers()) == []
    for lines, spoken in (("{}\n{}\n", [0]), ("{}\n{}\n", []), ("{}\n", [0])):  # cut by an attempt that begins anew
        run.metrics.write_text(lines)
        assert list(speakers()) == spoken


def test_whose_lines_stand_in_the_files_of_nodes(tmp_path: Path) -> None:
    run = create_run(tmp_path, "x")
    spoken = NodeLogs(run, place(Degrees(data=4), "cluster", 2), ("n1", "n2"))
    assert list(spoken()) == []
    run.node_log("n2").write_text("2: begins\nsrun: no rank's\n3: half")
    assert sorted(spoken()) == [2]
    run.node_log("n2").write_text("2: begins\nsrun: no rank's\n3: half a line\n")
    assert sorted(spoken()) == [3]
