"""Nodes that do not tell of the ends of their tasks, when srun ends a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_mp.supervisor.unended import UnendedTasks, patience

EARLIER = "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
STARTED = "srun: launch/slurm: _task_start: Node n2, 2 tasks started\n"
FAILED = "srun: error: n1: tasks 0-1: Exited with exit code 1\nsrun: launch/slurm: _step_signal: Terminating StepId=7.1\n"
OTHERS = "srun: error: n2: task 3: Terminated\nsrun: error: n2: task 2: Killed\n"


LAUNCHED = "srun: launching StepId=7.1 on host n1, 2 tasks: [0-1]\nsrun: launching StepId=7.1 on host n2, 2 tasks: [2-3]\n"


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize(("said", "later", "hosts"), [
    (FAILED, "", ("n2",)),
    (FAILED, "srun: error: n2: task 3: Terminated\n", ("n2",)),
    (FAILED, OTHERS, ()),
    ("srun: launch/slurm: n1: tasks 0-1: Completed\n" + OTHERS, "", ()),
    (STARTED, "", ()),  # srun does not end it
])
def test_who_does_not_tell(tmp_path: Path, said: str, later: str, hosts: tuple[str, ...], begins: bool) -> None:
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
    assert tasks.hosts == hosts


def test_a_site_that_leaves_its_tasks_more_time() -> None:
    assert (patience({"KillWait": "120 sec"}), patience({})) == (135.0, 45.0)
