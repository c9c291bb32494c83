"""The watch over slurmstepd: a node whose slurmstepd is killed, before or after the watch begins, is named and emptied."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rendering import executable
from slurm_jobs import until

from hpc_mp.base.files import write_json
from hpc_mp.layout.placement import Degrees, place, to_dict
from hpc_mp.program import stepd
from hpc_mp.program.stacks import lives
from hpc_mp.rundir import TOKEN, AttemptRecord, RunDirectory, create_run, write_attempt
from hpc_mp.rundir.failures import read_failures

TASK = """
import sys, time
from pathlib import Path
from hpc_mp.program.stepd import watch_stepd
from hpc_mp.rundir import RunDirectory
watch_stepd(RunDirectory(Path(sys.argv[1])))
Path(sys.argv[1], "watched").touch()
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create_run(tmp_path, "x")
    write_json(run.placement, to_dict(place(Degrees(data=2), "cluster", 1)))
    write_attempt(run.attempt_record, AttemptRecord("7.0.1", 1, ("n1", "n2"), "n1", 10001, "s", None, 120.0))
    return run


def test_a_slurmstepd_that_is_hidden_has_not_been_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may show a user no process of others (hidepid): all ranks there would be ended."""
    monkeypatch.setattr(stepd, "_read", lambda pid, name: "")
    assert stepd.stepd_above() is None


@pytest.mark.parametrize(("parent", "task_pid", "local", "token", "orphaned"), [
    ("slurmstepd", "$$", "0", "7.0.1", "process"),  # killed while the rank runs
    ("gone", "$$", "0", "7.0.1", "it"),  # killed before the rank could look: the run went on with a rank that Slurm had lost
    ("gone", "1", "0", "7.0.1", None),  # a process of a task's own
    ("gone", "", "0", "7.0.1", None),  # no task of Slurm
    ("gone", "$$", "1", "7.0.1", None),  # the first task of the node looks
    ("gone", "$$", "0", "", None),
    ("gone", "$$", "0", "7.0.9", None),  # of an earlier attempt: it ends, and says nothing
])
def test_the_end_of_slurmstepd(tmp_path: Path, run: RunDirectory, parent: str, task_pid: str, local: str, token: str,
                               orphaned: str | None) -> None:
    number = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid"
    start = f'sh -c \'{number}; SLURM_TASK_PID={task_pid} exec "$@"\' task "$@" &'
    ends = "wait" if parent == "slurmstepd" else "exit"
    starter = executable(tmp_path / "slurmstepd", f"#!/bin/sh\n{start}\n{ends}\n")
    environ = {**os.environ, "SLURM_JOB_ID": f"{os.getpid()}", "SLURM_STEP_ID": "1", "SLURM_LOCALID": local,
               "SLURMD_NODENAME": "n2"} | ({TOKEN: token} if token else {})
    step = subprocess.Popen([starter, sys.executable, "-c", TASK, run.path], env=environ)
    until((tmp_path / "pid").exists, "the task", 30)
    task = int((tmp_path / "pid").read_text())
    try:
        if parent == "slurmstepd":
            until((run.path / "watched").exists, "the watch", 30)
            step.kill()
        if orphaned is None and token != "7.0.9":
            until((run.path / "watched").exists, "the watch", 30)
            assert lives(task) and not read_failures(run, 1)
            return
        until(lambda: not lives(task), "the end of the task", 30)
        if orphaned is None:
            assert not read_failures(run, 1)
            return
        until(lambda: read_failures(run, 1), "the record", 30)
        [failure] = read_failures(run, 1)
        assert (failure.rank, failure.node, failure.kind) == (1, "n2", "orphaned")
        assert failure.message.startswith(f"{orphaned} ") and "was killed" in failure.message
    finally:
        step.kill()
        step.wait()
        if lives(task):
            os.kill(task, signal.SIGKILL)
