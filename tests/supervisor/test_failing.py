"""When the ranks that are left are ended, after one of a program has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_mp.diagnosis.lines import HANG_ENDED, OTHERS_ENDED, task_ends
from hpc_mp.supervisor.failing import LINGER_S, FailedStep

FAILED = "srun: error: n2: task 3: Exited with exit code 1\n"
WELL = "srun: n1: task 0: Completed\n"


@pytest.mark.parametrize("line", [FAILED, "srun: error: n2: tasks 2-3: Killed\n", "srun: error: n1: task 0: Out Of Memory\n"])
def test_the_others_have_a_moment(tmp_path: Path, line: str) -> None:
    log, now = tmp_path / "srun.log", [0.0]
    log.write_text(FAILED)  # of an earlier step
    step = FailedStep(log, lambda: now[0])
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
    log.write_text("")
    step = FailedStep(log, lambda: now[0])
    log.write_text(f"{HANG_ENDED}\n{FAILED}")
    assert not step.due()
    now[0] = 100
    assert not step.due()


def test_what_follows_is_an_echo() -> None:
    ends = list(task_ends([FAILED.strip(), OTHERS_ENDED, "srun: error: n1: tasks 0-1: Killed"]))
    assert [(end.host, end.code) for end in ends] == [("n2", 1)]


@pytest.mark.parametrize(("line", "told", "waits"), [
    (FAILED, True, True), (FAILED, False, False), ("srun: error: n2: task 3: Terminated\n", True, True),
    ("srun: error: n2: task 3: Exited with exit code 75\n", False, True)])
def test_ranks_that_were_told_to_stop_have_their_grace(tmp_path: Path, line: str, told: bool, waits: bool) -> None:
    """One has saved, or died of it, and the others have not saved yet."""
    log, now = tmp_path / "srun.log", [0.0]
    log.write_text("")
    step = FailedStep(log, lambda: now[0], stop_requested=lambda: told, grace=120.0, stop_codes=(75,))
    log.write_text(line)
    assert not step.due()
    now[0] = 119.0
    assert step.due() is not waits
    now[0] = 121.0
    assert step.due() is waits
