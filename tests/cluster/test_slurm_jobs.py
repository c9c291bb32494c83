"""What Slurm says about jobs: answers of several releases as they were recorded, and who is asked when."""

import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import LINES, RECORDED, SHOWN
from tables import table

from hpc_mp.base.assets import asset
from hpc_mp.base.command import CommandFailed
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.jobs import (
    FINAL,
    FORGOTTEN,
    REASONS,
    UNKNOWN,
    SlurmJob,
    explained,
    parse_lines,
    parse_sacct,
    parse_scontrol,
)

GONE = CommandFailed("slurm_load_jobs error: Invalid job id specified")
BUSY = CommandFailed("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
OFF = CommandFailed("Slurm accounting storage is disabled")
OLD = CommandFailed("squeue: unrecognized option '--Format'")
Asked = list[tuple[str, ...]]


def program(answers: Mapping[str, Any], asked: Asked | None = None) -> Callable[[Sequence[str]], str]:
    """Programs by name; each answers, or fails with a CommandFailed."""
    def ask(argv: Sequence[str]) -> str:
        if asked is not None:
            asked.append(tuple(argv))
        answer = answers.get(argv[0], CommandFailed(f"{argv[0]} is not on PATH"))
        if isinstance(answer, CommandFailed):
            raise answer
        return str(answer)

    return ask


# --- answers, as recorded -----------------------------------------------------------------------------------------


LINES_22 = Path(__file__).with_name("squeue-22.05.lines").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slurm writes local time."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def by_id(jobs: list[SlurmJob]) -> dict[str, SlurmJob]:
    return {job.id: job for job in jobs}


def test_lines_of_22() -> None:
    jobs = by_id(parse_lines(LINES_22))
    assert list(jobs) == ["1", "3", "4", "2_0", "2_[1-2%1]", "5+0", "5+1", "7"]
    running, held = jobs["1"], jobs["4"]
    assert (running.state, running.nodes, running.restarts, running.start, running.reason, running.exit_code) == (
        "RUNNING", ("n1", "n2"), 2, 1795172615, "", None)
    assert (held.reason, held.remedy, held.start) == ("JobHeldUser", "scontrol release 4", None)
    assert (jobs["3"].exit_code, jobs["7"].exit_code) == (3, -9)


def test_two_forms_of_24_say_the_same() -> None:
    lines, shown = ((RECORDED / file).read_text(encoding="utf-8") for file in (LINES, SHOWN))
    jobs = by_id(parse_lines(lines))
    assert jobs == by_id(parse_scontrol(shown))
    assert {job.id: (job.state, job.reason, job.exit_code, job.restarts, len(job.nodes)) for job in jobs.values()} == {
        "1": ("RUNNING", "", None, 0, 2),
        "2": ("FAILED", "NonZeroExitCode", 3, 0, 1),
        "3": ("FAILED", "RaisedSignal:9(Killed)", -9, 0, 1),
        "4": ("PENDING", "JobHeldUser", None, 0, 0),
        "5": ("PENDING", "BeginTime", None, 1, 0),
        "6_0": ("RUNNING", "", None, 0, 1),
        "6_[1-2%1]": ("PENDING", "JobArrayTaskLimit", None, 0, 0),
        "7+0": ("RUNNING", "", None, 0, 1),
        "7+1": ("RUNNING", "", None, 0, 1),
        "9": ("COMPLETING", "", None, 0, 1),
    }
    assert not jobs["9"].ended, "it clears up"


SCONTROL = ("JobId=8 ArrayJobId=2 ArrayTaskId=0 JobName=w x JobState=RUNNING Reason=None Restarts=1 ExitCode=0:0 "
            "StartTime=2026-11-20T11:03:35 ReqNodeList=(null) NodeList=n1 BatchHost=n1\n"
            "JobId=2 ArrayJobId=2 ArrayTaskId=1-2%1 JobState=PENDING Reason=JobArrayTaskLimit StartTime=Unknown NodeList= \n"
            "JobId=6 HetJobId=5 HetJobOffset=1 JobState=FAILED Reason=RaisedSignal:9(Killed) ExitCode=0:9 NodeList=(null)\n")


def test_scontrol() -> None:
    running, waiting, failed = parse_scontrol(SCONTROL)
    assert (running.id, running.restarts, running.nodes, running.exit_code) == ("2_0", 1, ("n1",), None)
    assert (waiting.id, waiting.reason) == ("2_[1-2%1]", "JobArrayTaskLimit")
    assert (failed.id, failed.exit_code, failed.nodes) == ("5+1", -9, ())
    assert "signal" in failed.meaning


def test_sacct() -> None:
    done, killed = parse_sacct("7|COMPLETED|2026-11-20T11:03:35|n[1-2]|0:0\n8|CANCELLED by 0|None|None assigned|0:15\n")
    assert (done.state, done.nodes, done.exit_code) == ("COMPLETED", ("n1", "n2"), 0)
    assert (killed.state, killed.nodes, killed.exit_code) == ("CANCELLED", (), -15)


# --- who is asked -------------------------------------------------------------------------------------------------


def test_one_question_for_all_jobs() -> None:
    asked: Asked = []
    jobs = queue.job_states(["1", "3", "2", "5"], program({"squeue": LINES_22}, asked))
    assert len(asked) == 1 and "--jobs=1,3,2,5" in asked[0]
    assert [jobs[each].state for each in ("1", "3", "2", "5")] == ["RUNNING", "FAILED", "RUNNING", "RUNNING"]
    assert [part.id for part in jobs["2"].parts] == ["2_0", "2_[1-2%1]"]
    assert jobs["5"].nodes == ("n1", "n2")


NAMES = {"GONE": GONE, "BUSY": BUSY, "OFF": OFF, "OLD": OLD, "FORGOTTEN": FORGOTTEN, "UNKNOWN": UNKNOWN}


@pytest.mark.parametrize(("answers", "state"), table(__file__, "slurm_jobs.toml", "programs", NAMES))
def test_with_and_without_each_program(answers: dict[str, Any], state: str) -> None:
    assert queue.job_states(["7"], program(answers))["7"].state == state


def test_jobs_that_squeue_has_dropped_are_asked_for_alone() -> None:
    asked: Asked = []
    answers = {"squeue": LINES_22, "scontrol": GONE, "sacct": "9|TIMEOUT|Unknown|n1|0:0"}
    jobs = queue.job_states(["1", "9"], program(answers, asked))
    assert (jobs["1"].state, jobs["9"].state) == ("RUNNING", "TIMEOUT")
    assert [argv[0] for argv in asked] == ["squeue", "scontrol", "sacct"] and asked[2].count("--jobs=9") == 1


# --- waiting ------------------------------------------------------------------------------------------------------


def test_wait_looks_ever_more_rarely_and_ends_with_the_last_state() -> None:
    states = ["PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "PENDING", "RUNNING", "RUNNING", "TIMEOUT"]
    answers = iter(f"7|{state}|N/A||0|0|None|" for state in states)
    pauses: list[tuple[str, float]] = []
    last = queue.wait(["7"], lambda jobs, seconds: pauses.append((jobs["7"].state, seconds)), lambda argv: next(answers))
    assert last["7"].state == "TIMEOUT"
    assert [state for state, _ in pauses] == states[:-1]
    seconds = [seconds for _, seconds in pauses]
    assert seconds == sorted(seconds) and all(each >= 30 for each in seconds[3:])


def test_wait_outlives_a_controller_that_is_away() -> None:
    looks: list[float] = []

    def ask(argv: Sequence[str]) -> str:
        if not looks:
            raise BUSY
        return "7|COMPLETED|N/A||0|0|None|\n"

    assert queue.wait(["7"], lambda jobs, seconds: looks.append(seconds), ask)["7"].state == "COMPLETED"
    assert len(looks) == 1


def test_wait_waits_for_all() -> None:
    answers = iter(["1|COMPLETED|N/A||0|0|None|\n2|RUNNING|N/A||0|0|None|",
                    "1|COMPLETED|N/A||0|0|None|\n2|FAILED|N/A||0|256|NonZeroExitCode|"])
    ended = queue.wait(["1", "2"], lambda jobs, seconds: None, lambda argv: next(answers))
    assert [job.state for job in ended.values()] == ["COMPLETED", "FAILED"] and ended["2"].exit_code == 1


# --- reasons ------------------------------------------------------------------------------------------------------

NAMED = re.findall(r"\w+", table(__file__, "slurm_jobs.toml", "reasons"))


@pytest.mark.parametrize("reason", [*NAMED, "launch failed requeued held", "launch_failed_requeued_held"])
def test_a_known_reason_has_a_meaning_and_a_remedy(reason: str) -> None:
    job = explained(SlurmJob("7", "PENDING", reason))
    assert job.reason == reason and job.meaning and job.remedy


def test_the_table_is_sound() -> None:
    table = tomllib.loads(asset(REASONS).read_text(encoding="utf-8"))
    assert len(table) >= 35
    for meaning, remedy in table.values():
        assert meaning and remedy and not meaning.endswith(".") and not remedy.endswith(".")


def test_a_reason_may_name_nodes_or_be_unknown() -> None:
    first, again = (explained(SlurmJob("7", "PENDING", "BadConstraints", restarts=restarts)) for restarts in (0, 1))
    assert "what it asks for" in first.meaning and "queued again while one of its nodes was dead" in again.meaning
    assert again.remedy.startswith("hpc-mp cancel 7;")
    named = explained(SlurmJob("7", "PENDING", "ReqNodeNotAvail, UnavailableNodes:n3"))
    assert named.reason == "ReqNodeNotAvail, UnavailableNodes:n3" and "sinfo -R" in named.remedy
    job = explained(SlurmJob("7", "PENDING", "SiteHasMoved"))
    assert (job.reason, job.meaning, job.remedy) == ("SiteHasMoved", "", "")


# --- arrays -------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["RUNNING", "PENDING", "COMPLETED", "FAILED", "COMPLETING", "TIMEOUT"]), min_size=2))
def test_an_array_ends_with_its_last_task_and_is_done_when_all_are(states: list[str]) -> None:
    text = "".join(f"9_{task}|{state}|N/A||0|0|None|\n" for task, state in enumerate(states))
    job = queue.job_states(["9"], program({"squeue": text}))["9"]
    assert job.ended == all(state in FINAL for state in states)
    assert (job.state == "COMPLETED") == (set(states) == {"COMPLETED"})
    assert job.waits == (not {"RUNNING", "COMPLETING"} & set(states) and "PENDING" in states)
