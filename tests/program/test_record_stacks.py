"""What looks at ranks from outside: at those that hang, with py-spy or SIGABRT, and at the slurmstepd above them."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rendering import executable
from slurm_jobs import until
from tables import table

from hpc_mp.base.files import write_json
from hpc_mp.diagnosis.stacks import read_stacks
from hpc_mp.layout.placement import Degrees, place, to_dict
from hpc_mp.program import stacks, stepd
from hpc_mp.program.stacks import lives, rank_of, record_stacks
from hpc_mp.rundir import TOKEN, AttemptRecord, RunDirectory, create_run, write_attempt
from hpc_mp.rundir.failures import read_failures
from hpc_mp.supervisor.silence import add_what_logs_say

HANGS = "import sys, time\ndef next_batch():\n    print('begins', flush=True)\n    time.sleep(60)\nnext_batch()\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create_run(tmp_path, "x")
    write_json(run.placement, to_dict(place(Degrees(data=2), "cluster", 1)))
    write_attempt(run.attempt_record, AttemptRecord("7.0.1", 1, ("n1", "n2"), "n1", 10001, "s", None, 120.0))
    return run


@pytest.fixture
def ranks(run: RunDirectory, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that hang, the second one's Python a child of a shell."""
    file = tmp_path / "train.py"
    file.write_text(HANGS)
    started = []
    for rank, command in enumerate(([sys.executable, file], ["bash", "-c", '"$@"; exit 3', "-", sys.executable, file])):
        environ = {**os.environ, "RANK": str(rank), "HPC_MP_RUN": str(run.path), "HPC_MP_ATTEMPT": "1", "PYTHONFAULTHANDLER": "1"}
        with run.rank_log(rank).open("w") as log:
            process = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        started.append(process)
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("environ", "rank"), table(__file__, "record_stacks.toml", "processes"))
def test_who_a_process_is(environ: dict[str, str], rank: int | None) -> None:
    assert rank_of(environ) == rank


def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "TOOL", "no-such-py-spy")


def test_without_py_spy_by_sigabrt(run: RunDirectory, ranks: list[subprocess.Popen[str]], tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    without_py_spy(monkeypatch)
    for rank in ranks:
        resource.prlimit(rank.pid, resource.RLIMIT_CORE, (1 << 20, resource.prlimit(rank.pid, resource.RLIMIT_CORE)[1]))
    assert record_stacks(run, 1) == [0, 1]
    assert [rank.wait(10) for rank in ranks] == [-6, 3]
    add_what_logs_say(run, lambda rank: run.rank_log(rank).read_text().splitlines())
    assert [str(stack) for stack in read_stacks(run)] == ["train.py:4 in next_batch"] * 2
    assert not list(tmp_path.glob("core*"))


@pytest.mark.skipif(shutil.which(stacks.TOOL, path=f"{os.environ['PATH']}:{Path(sys.executable).parent}") is None,
                    reason="py-spy is not installed")
def test_with_py_spy_they_live_on(run: RunDirectory, ranks: list[subprocess.Popen[str]]) -> None:
    assert record_stacks(run, 1) == [0, 1]
    assert [str(stack) for stack in read_stacks(run)] == ["train.py:4 in next_batch"] * 2
    assert [rank.poll() for rank in ranks] == [None, None]


def test_other_attempts_and_runs_are_none_of_its_business(
        run: RunDirectory, ranks: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_py_spy(monkeypatch)
    assert record_stacks(run, 2) == [] and record_stacks(create_run(tmp_path, "y"), 1) == []
    assert [rank.poll() for rank in ranks] == [None, None] and read_stacks(run) == []


TASK = Path(__file__).parent / "bin" / "watches_stepd"


def test_a_slurmstepd_that_is_hidden_has_not_been_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may show a user no process of others (hidepid): all ranks there would be ended."""
    monkeypatch.setattr(stepd, "read_proc", lambda pid, name: "")
    monkeypatch.setattr(stepd, "stat_of", lambda pid: [])
    assert stepd.stepd_above() is None


@pytest.mark.parametrize(("parent", "task_pid", "local", "token", "orphaned"), table(__file__, "record_stacks.toml", "ends"))
def test_the_end_of_slurmstepd(tmp_path: Path, run: RunDirectory, parent: str, task_pid: str, local: str, token: str,
                               orphaned: str) -> None:
    number = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid"
    start = f'sh -c \'{number}; SLURM_TASK_PID={task_pid} exec "$@"\' task "$@" &'
    ends = "wait" if parent == "slurmstepd" else "exit"
    starter = executable(tmp_path / "slurmstepd", f"#!/bin/sh\n{start}\n{ends}\n")
    environ = {**os.environ, "SLURM_JOB_ID": f"{os.getpid()}", "SLURM_STEP_ID": "1", "SLURM_LOCALID": local,
               "SLURMD_NODENAME": "n2"} | ({TOKEN: token} if token else {})
    step = subprocess.Popen([starter, sys.executable, TASK, run.path], env=environ)
    until((tmp_path / "pid").exists, "the task", 30)
    task = int((tmp_path / "pid").read_text())
    try:
        if parent == "slurmstepd":
            until((run.path / "watched").exists, "the watch", 30)
            step.kill()
        if not orphaned and token != "7.0.9":
            until((run.path / "watched").exists, "the watch", 30)
            assert lives(task) and not read_failures(run, 1)
            return
        until(lambda: not lives(task), "the end of the task", 30)
        if not orphaned:
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
