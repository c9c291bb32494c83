"""The task of a node under mpirun, without Slurm: who may start what on it, what it passes on, and how mpirun is told of it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_mp.program.guard import first_code
from hpc_mp.program.mpirun import FAMILIES, without_task
from hpc_mp.program.node import KEPT_BACK, NodeAccess, PassedOn, agent, send_signal
from hpc_mp.rundir import AttemptRecord, RunDirectory
from hpc_mp.rundir.attempt import write_attempt

HARD = ["a b", "$HOME", "'", '"', "é 漢"]


@pytest.fixture(autouse=True)
def dispositions() -> Iterator[None]:
    """As they were: an agent, which is a process of its own, changes them."""
    before = {number: signal.getsignal(number) for number in KEPT_BACK}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def record() -> AttemptRecord:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return AttemptRecord("1.0.1", 1, ("n1",), "localhost", free.getsockname()[1], "secret of this attempt",
                             addresses=("localhost",))


@pytest.fixture
def run(tmp_path: Path, record: AttemptRecord) -> RunDirectory:
    write_attempt(RunDirectory(tmp_path).attempt_record, record)
    return RunDirectory(tmp_path)


def test_the_agent_starts_a_command_on_a_host_and_ends_alike(tmp_path: Path, run: RunDirectory, record: AttemptRecord) -> None:
    access = NodeAccess(record, {**os.environ, "OWN": "of the node"}, [])
    assert agent(run.path, ["-x", "n1", f'printf %s "$OWN" > {tmp_path}/said;', "exit", "7"]) == 7
    assert (tmp_path / "said").read_text() == "of the node" and access.over.wait(5)


@pytest.mark.parametrize("before", ["", "true;", "OWN=x;export OWN;"])  # Open MPI 5 exports before its daemon
def test_a_daemon_is_kept_from_what_is_sent_to_all_of_its_step(
        tmp_path: Path, run: RunDirectory, record: AttemptRecord, before: str) -> None:
    """Slurm may know processes by their parents. The task of the node itself takes all of it."""
    NodeAccess(record, os.environ, [])
    assert agent(run.path, ["n1", before, "grep", "SigBlk", "/proc/self/status", ">", f"{tmp_path}/said"]) == 0
    blocked = int((tmp_path / "said").read_text().split()[1], 16)
    assert [number for number in KEPT_BACK if not blocked >> number - 1 & 1] == []
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*KEPT_BACK}


def test_who_does_not_know_the_secret_starts_nothing(tmp_path: Path, run: RunDirectory, record: AttemptRecord) -> None:
    access = NodeAccess(record, os.environ, [])
    write_attempt(run.attempt_record, replace(record, secret="another"))
    with pytest.raises(Exception, match="digest"):
        agent(run.path, ["n1", "touch", f"{tmp_path}/said"])
    assert not (tmp_path / "said").exists() and not access.over.is_set()


def test_a_signal_is_told_to_all_tasks(record: AttemptRecord) -> None:
    noted: list[int] = []
    access = NodeAccess(record, os.environ, noted)
    send_signal(record, "USR1")
    assert noted == [signal.SIGUSR1] and not access.over.is_set()


def test_guards_are_asked_to_stop_and_other_processes_are_left_alone(tmp_path: Path, run: RunDirectory) -> None:
    """A process id may be another's by now."""
    guard = subprocess.Popen([sys.executable, "-c", "import sys, time; print(flush=True); time.sleep(60)", "hpc_mp.program"],
                             stdout=subprocess.PIPE)
    other = subprocess.Popen(["sleep", "60"])
    assert guard.stdout is not None and guard.stdout.readline()
    for process in (guard, other):
        (tmp_path / str(process.pid)).touch()
    signals = PassedOn(run, 1, "SIGTERM", tmp_path)
    signals.send()
    assert guard.poll() is None, "nobody has asked"
    signals.note(signal.SIGTERM)
    signals.send()
    assert guard.wait(10) == -signal.SIGUSR2 and other.poll() is None
    assert not signals.end()
    other.kill()
    other.wait()


def test_what_outlives_mpirun_is_ended_and_counts_as_a_failure(tmp_path: Path, run: RunDirectory) -> None:
    guard = subprocess.Popen(["sleep", "60"], executable="/bin/sleep")
    (tmp_path / str(guard.pid)).touch()
    signals = PassedOn(run, 1, "SIGTERM", tmp_path)
    assert not signals.end(), "it is no guard"
    guard.kill()
    guard = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", "hpc_mp.program"],
                             stdout=subprocess.PIPE)
    assert guard.stdout is not None and guard.stdout.readline(), "it runs by now"
    (tmp_path / str(guard.pid)).touch()
    assert signals.end() and guard.wait(10) == -signal.SIGKILL


def test_the_first_end_of_a_rank_counts(tmp_path: Path) -> None:
    assert first_code(tmp_path) == 0
    for number, code in enumerate((75, 143)):
        (tmp_path / f"ended.{code}").touch()
        os.utime(tmp_path / f"ended.{code}", (number, number))
    assert first_code(tmp_path) == 75


def test_who_mpirun_starts_is_not_the_task_of_srun_around_it() -> None:
    kept = {"SLURM_JOB_ID": "1", "SLURM_CONF": "x", "SLURMD_NODENAME": "n1", "PATH": "/bin"}
    of_task = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_NTASKS", "SLURM_NPROCS", "PMI_RANK")
    assert without_task({**kept, **dict.fromkeys(of_task, "0")}) == kept


@pytest.mark.parametrize(("says", "words"), [
    ("mpirun (Open MPI) 5.0.11", ["-n", "4", "--host", "n1:2,n2:2", "--map-by", "ppr:2:node:OVERSUBSCRIBE"]),
    ("HYDRA build details:", ["-n", "4", "-ppn", "2", "-hosts", "n1,n2"])])
def test_each_kind_of_mpirun_is_told_the_hosts(says: str, words: list[str]) -> None:
    found = next(each for each in FAMILIES if each.version_pattern.split("|")[0] in says)
    assert found.on(("n1", "n2"), 2)[:len(words)] == words
