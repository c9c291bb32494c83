"""What the supervisor watches: silence, failed steps, and nodes that do not tell of the ends of their tasks."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
from tables import table

from hpc_mp.diagnosis.lines import HANG_ENDED, OTHERS_ENDED, task_ends
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import RunDirectory, create_run
from hpc_mp.supervisor.silence import TROUBLED_S, NodeLogs, SilenceWatch, rank_files
from hpc_mp.supervisor.unended import LINGER_S, FailedStep, UnendedTasks, patience


class Clock:
    """Seconds as a test wants them, and ranks that print then."""

    def __init__(self, spoken: dict[float, Collection[int]]) -> None:
        self.now, self.spoken = 0.0, spoken

    def __call__(self) -> float:
        return self.now

    def speakers(self) -> Collection[int]:
        return self.spoken.get(self.now, ())

    def noticed_by(self, watch: SilenceWatch, seconds: Iterable[int]) -> list[int]:
        """The seconds of these in which the watch notices a hang."""
        found = []
        for second in seconds:
            self.now = float(second)
            found += [second] if watch.noticed() else []
        return found


@pytest.mark.parametrize(("spoken", "ranks", "limit", "at", "first"), [
    ({}, 2, 10, 10, None), ({}, 1, 10, 10, 0), ({5: [0]}, 2, 10, 15, None), ({2: [1], 8: [0]}, 2, 10, 18, 1),
    ({2: [0, 1], 4: [0]}, 2, 10, 14, None), ({2: [0, 1, 2], 9: [0, 2]}, 3, 10, 19, 1),
    ({2: [0, 1, 2], 9: [0]}, 3, 10, 19, None), ({}, 2, 0, None, None),
    ({1: [0], 9: [0], 18: [0], 27: [0], 36: [0], 45: [0], 54: [0], 60: [0]}, 1, 10, None, None)])
def test_a_hang(spoken: dict[float, list[int]], ranks: int, limit: float, at: float | None, first: int | None) -> None:
    clock = Clock(dict(spoken))
    watch = SilenceWatch(limit, ranks, clock.speakers, clock)
    assert (clock.noticed_by(watch, range(61)) or [None])[0] == at
    assert (watch.hang.rank if watch.hang else None) == first
    if watch.hang is not None:
        assert "no rank has printed a line for 10 s (program.silent_limit)" in str(watch.hang)


@pytest.mark.parametrize(("spoken", "limit", "troubled", "at"), [
    ({}, 3600, True, TROUBLED_S), ({}, 3600, False, None), ({}, 0, True, None), ({}, 50, True, 50), ({5: [0]}, 3600, True, None)])
def test_ranks_that_may_never_begin_have_less_time(spoken: dict[float, list[int]], limit: float, troubled: bool,
                                                   at: float | None) -> None:
    clock = Clock(dict(spoken))
    watch = SilenceWatch(limit, 4, clock.speakers, clock, troubled=lambda: troubled)
    assert (clock.noticed_by(watch, range(0, 900, 5)) or [None])[0] == at


@pytest.mark.parametrize(("line", "troubled", "ranks"), table(__file__, "watches.toml", "plug_in"))
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
    noticed = clock.noticed_by(watch, (*range(spoke - 5, 20), *range(resumed, resumed + 40)))
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


# --- when the ranks that are left are ended, after one of a program has failed ----------------------------------------


ONE_FAILED = "srun: error: n2: task 3: Exited with exit code 1\n"
WELL = "srun: n1: task 0: Completed\n"


def failed_step(log: Path, before: str, now: list[float], **given: Any) -> FailedStep:
    """The watch over a step in whose log stands so much already."""
    log.write_text(before)
    return FailedStep(log, lambda: now[0], **given)


@pytest.mark.parametrize("line", [ONE_FAILED, "srun: error: n2: tasks 2-3: Killed\n", "srun: error: n1: task 0: Out Of Memory\n"])
def test_the_others_have_a_moment(tmp_path: Path, line: str) -> None:
    log, now = tmp_path / "srun.log", [0.0]
    step = failed_step(log, ONE_FAILED, now)  # of an earlier step
    now[0] = 100
    assert not step.due()
    with open(log, "a") as more:
        more.write(WELL + line)
    assert not step.due(), "not yet"
    now[0] += LINGER_S - 0.1
    assert not step.due()
    now[0] += 0.2
    assert step.due() and not step.due(), "once"


def test_a_step_that_is_being_ended_is_left_alone(tmp_path: Path) -> None:
    log, now = tmp_path / "srun.log", [0.0]
    step = failed_step(log, "", now)
    log.write_text(f"{HANG_ENDED}\n{ONE_FAILED}")
    assert not step.due()
    now[0] = 100
    assert not step.due()


def test_what_follows_is_an_echo() -> None:
    ends = list(task_ends([ONE_FAILED.strip(), OTHERS_ENDED, "srun: error: n1: tasks 0-1: Killed"]))
    assert [(end.host, end.code) for end in ends] == [("n2", 1)]


@pytest.mark.parametrize(("line", "told", "waits"), table(__file__, "watches.toml", "grace", globals()))
def test_ranks_that_were_told_to_stop_have_their_grace(tmp_path: Path, line: str, told: bool, waits: bool) -> None:
    """One has saved, or died of it, and the others have not saved yet."""
    log, now = tmp_path / "srun.log", [0.0]
    step = failed_step(log, "", now, stop_requested=lambda: told, grace=120.0, stop_codes=(75,))
    log.write_text(line)
    for seconds, due in ((0.0, False), (119.0, not waits), (121.0, waits)):
        now[0] = seconds
        assert step.due() is due


# --- nodes that do not tell of the ends of their tasks, when srun ends a step ------------------------------------------


EARLIER = "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
ENDED = "srun: error: n1: tasks 0-1: Exited with exit code 1\nsrun: launch/slurm: _step_signal: Terminating StepId=7.1\n"
OTHERS = "srun: error: n2: task 3: Terminated\nsrun: error: n2: task 2: Killed\n"
LAUNCHED = "srun: launching StepId=7.1 on host n1, 2 tasks: [0-1]\nsrun: launching StepId=7.1 on host n2, 2 tasks: [2-3]\n"


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize(("said", "later", "hosts"), table(__file__, "watches.toml", "silent_hosts", globals()))
def test_who_does_not_tell(tmp_path: Path, said: str, later: str, hosts: list[str], begins: bool) -> None:
    """Of a step that is under way: hosts whose tasks had ended by then were named."""
    log, now = tmp_path / "srun.log", [0.0]
    log.write_text(EARLIER + ("" if begins else LAUNCHED + said))
    tasks = UnendedTasks(log, {"n1": 2, "n2": 2}, lambda: {"KillWait": "30 sec"}, lambda: now[0], begins)
    if begins:
        assert not tasks.noticed() and not tasks.begun, "an earlier step"
    for seconds, words in ((100.0, said if begins else ""), (144.0, later), (146.0, "")):
        now[0] = seconds
        with open(log, "a") as file:
            file.write(words)
        assert tasks.noticed() is (seconds == 146.0 and bool(hosts))
    assert [*tasks.hosts] == hosts


def test_a_site_that_leaves_its_tasks_more_time() -> None:
    assert (patience({"KillWait": "120 sec"}), patience({})) == (135.0, 45.0)
