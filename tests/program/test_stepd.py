"""Ranks whose slurmstepd is killed: neither Slurm nor srun notices, and they live on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_rank import give, run

from hpc_mp.program.stepd import await_end
from hpc_mp.rundir import AttemptRecord, RunDirectory, write_attempt
from hpc_mp.rundir.failures import read_failures

__all__ = ["run"]

# A process of slurmstepd's name, which starts a task and waits for its end.
STEPD = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(15, b"slurmstepd")
task = subprocess.Popen(sys.argv[1:])
print(task.pid, flush=True)
task.wait()
"""
LASTING = ["sh", "-c", "sleep 100 & touch begun; wait; true"]


@pytest.fixture
def mark() -> Iterator[str]:
    made = f"STEPD_MARK={os.urandom(8).hex()}"
    yield made
    for pid in marked(made):
        os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Processes with this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def step(run: RunDirectory, mark: str, command: list[str], **environ: str) -> tuple[subprocess.Popen[str], int]:
    """The first task of n2, begun, with its slurmstepd."""
    give(run, command)
    write_attempt(run.attempt_record, AttemptRecord("7.0.1", 1, ("n1", "n2"), "n1", 4711, "s"))
    name, _, value = mark.partition("=")
    given = {name: value, "HPC_MP_TOKEN": "7.0.1", "SLURMD_NODENAME": "n2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": value,
             "SLURM_STEP_ID": "1", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", **environ}
    stepd = subprocess.Popen([sys.executable, "-c", STEPD, sys.executable, "-P", "-m", "hpc_mp.program", str(run.path)],
                             env={**os.environ, **given}, stdout=subprocess.PIPE, text=True)
    assert stepd.stdout is not None
    return stepd, int(stepd.stdout.readline())


def begun(run: RunDirectory) -> bool:
    return (run.path.parent / "a directory" / "begun").exists()


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    due = time.monotonic() + seconds
    while not condition() and time.monotonic() < due:
        time.sleep(0.05)
    return condition()


def later(run: RunDirectory) -> None:
    write_attempt(run.attempt_record, AttemptRecord("7.1.2", 2, ("n3", "n4"), "n3", 4711, "s"))


@pytest.mark.parametrize(("before", "records"), [(lambda _: None, 1), (later, 0)], ids=["this attempt", "a later one has begun"])
def test_ranks_without_slurmstepd_are_ended_and_named(
        run: RunDirectory, mark: str, before: Callable[[RunDirectory], None], records: int) -> None:
    stepd, _ = step(run, mark, LASTING)
    assert within(30, lambda: begun(run))
    before(run)
    stepd.kill()
    stepd.wait()
    assert within(20, lambda: not marked(mark)), "its children and the watch have gone too"
    found = read_failures(run)
    assert [(end.kind, end.rank, end.node, end.nodes) for end in found] == [("orphaned", 2, "n2", ("n2",))] * records
    assert all(str(end).startswith("rank 2 on n2 lost the slurmstepd that had started it: ") for end in found)


@pytest.mark.parametrize(("command", "number"), [
    (["true"], None), (["false"], None), (["sh", "-c", "touch begun; sleep 100"], signal.SIGKILL)])
def test_ranks_that_end_before_slurmstepd_are_no_orphans(
        run: RunDirectory, mark: str, command: list[str], number: int | None) -> None:
    stepd, task = step(run, mark, command)
    if number is not None:
        assert within(30, lambda: begun(run))
        os.kill(task, number)
    assert stepd.wait(30) == 0
    assert within(20, lambda: len(marked(mark)) <= (number is not None)), "what a killed shell has left alone"
    assert not read_failures(run)


def test_one_rank_of_a_node_watches(run: RunDirectory, mark: str) -> None:
    """Negative control: nothing else ends them."""
    stepd, task = step(run, mark, LASTING, SLURM_LOCALID="1")
    assert within(30, lambda: begun(run))
    stepd.kill()
    stepd.wait()
    time.sleep(1.5)
    assert len(marked(mark)) == 2 and task in marked(mark) and not read_failures(run)


def test_the_end_of_a_process_is_awaited_on_an_old_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    lasting, short = (subprocess.Popen(["sleep", seconds]) for seconds in ("60", "0.5"))
    await_end(lasting.pid, short.pid)
    assert short.wait(0.1) == 0 and lasting.poll() is None
    lasting.kill()
    lasting.wait()
