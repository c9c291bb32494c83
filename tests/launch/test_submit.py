"""``hpc_mp.submit``: Python callables on emulated nodes and on a real Slurm without accounting."""

import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from launching import until
from slurm_lab.lab import Lab

import hpc_mp
from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.launch.submit import tasks
from hpc_mp.launch.submit.api import SubmittedJob


def where() -> tuple[int, str, str]:
    return int(os.environ["RANK"]), os.environ["SLURMD_NODENAME"], os.environ["MASTER_ADDR"]


def raises() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    sleep()


def killed() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    sleep()


def sleep() -> None:
    time.sleep(60)


def greet() -> str:
    """Task 0 listens where everybody expects it."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as server:
            for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
                server.accept()[0].sendall(b"hello")
        return "hello"
    for _ in range(100):
        try:
            with socket.create_connection(address, timeout=5) as client:
                return client.recv(5).decode()
        except ConnectionRefusedError:
            time.sleep(0.1)
    return "nobody"


def early() -> str:
    time.sleep(2)
    return "alive"


# --- emulated nodes -----------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> dict[str, Any]:
    return {"on": "local", "directory": tmp_path / "calls"}


def test_one_result_per_task(here: dict[str, Any]) -> None:
    """Arguments and closures arrive, and the tasks meet at task 0."""
    hello = "hello"

    def told(name: str, by: int = 1) -> tuple[Any, ...]:
        return *where(), greet(), f"{hello} {name}" * by

    job = hpc_mp.submit(told, "you", by=2, nodes=2, tasks_per_node=2, **here)
    assert job.results(60) == [(rank, f"node{rank // 2}", "127.0.0.1", "hello", "hello youhello you") for rank in range(4)]
    assert job.result() == job.results()[0]
    assert all("Exiting after successful completion" in log.read_text() for log in job.logs)
    assert job.id.isdigit() and job.words == ""


@pytest.mark.parametrize(("call", "words"), [
    (raises, r"task 1 on node1 failed: ValueError: boom\nTraceback[^$]*in raises[^$]*_1_log.out"),
    (killed, "task 1 on node1 was killed by SIGKILL")])
def test_a_failure_names_task_host_and_error(here: dict[str, Any], call: Callable[[], None], words: str) -> None:
    job = hpc_mp.submit(call, nodes=2, **here)
    with pytest.raises(RunFailed, match=words):
        job.results(60)
    until(lambda: job.state == "FAILED")


def test_no_result_in_time_then_cancelled(here: dict[str, Any]) -> None:
    job = hpc_mp.submit(sleep, tasks_per_node=2, **here)
    with pytest.raises(TimeoutError, match="RUNNING after 1 s"):
        job.results(1)
    job.cancel()
    with pytest.raises(RunFailed):
        job.results(60)
    assert job.state == "CANCELLED"


@pytest.mark.parametrize(("call", "arguments", "words"), [
    (sleep, {"nodes": 0}, "nodes = 0"), (sleep, {"tasks_per_node": -1}, "tasks_per_node"), (sleep, {"nodes": "2"}, "nodes = 2"),
    (sleep, {"on": "mpi"}, "Choose one of auto, slurm, local"), (sleep, {"slurm": {"tim": 5}}, "'tim'"),
    (sleep, {"slurm": {"partitoin": "x"}}, "'partitoin'"),
    *((nothing, {}, "nothing that can be called") for nothing in (3, "job.toml", None, {"job": {}}))])
def test_what_is_refused_at_once(here: dict[str, Any], call: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        hpc_mp.submit(call, **here | arguments)
    assert not any(path.name.startswith("int") for path in Path(here["directory"]).glob("*"))


# --- a real Slurm, without accounting -----------------------------------------------------------------------------


@pytest.fixture
def there(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("SLURM_CONF", lab.environ["SLURM_CONF"])
    return {"on": "slurm", "directory": lab.share / "calls"}


def ended(lab: Lab, job: SubmittedJob) -> str:
    return lab.wait_job(int(job.id), timeout=120)["JobState"]


def test_slurm_gives_one_result_per_task(lab: Lab, there: dict[str, Any]) -> None:
    """With rank 0 on the last node."""
    hosts = lab.share / "hosts"
    hosts.write_text("n3\nn1\nn3\nn1\n")
    options = {"nodelist": "n1,n3", "setup": [f"export SLURM_HOSTFILE={hosts}"], "srun_args": ["--distribution=arbitrary"],
               "partition": "all", "time": 2}
    job = hpc_mp.submit(where, nodes=2, tasks_per_node=2, slurm=options, **there)
    assert job.results(60) == [(0, "n3", "n3"), (1, "n1", "n3"), (2, "n3", "n3"), (3, "n1", "n3")]
    assert ended(lab, job) == "COMPLETED"
    script = (job.folder / "job.sbatch").read_text()
    assert "--signal=USR2@30\n" in script, "90 s, as of longer jobs, would reach one of two minutes when it starts"
    assert hpc_mp.submit(greet, nodes=2, tasks_per_node=2, slurm=options, **there).results(60) == ["hello"] * 4


def test_a_failure_on_slurm_ends_the_job(lab: Lab, there: dict[str, Any]) -> None:
    job = hpc_mp.submit(raises, nodes=2, **there)
    with pytest.raises(RunFailed, match="task 1 on n2 failed: ValueError: boom"):
        job.results(60)
    assert ended(lab, job) == "FAILED"  # soon: srun would wait 60 s for the other tasks


def test_a_task_that_ends_without_a_word_is_named_by_srun(lab: Lab, there: dict[str, Any]) -> None:
    """Another one is then ended with SIGTERM, or SIGKILL if that takes long: 143 or 137 is the greater number."""
    late = 'if [ "$SLURM_PROCID" = 1 ]; then exit 7; else exec sleep 60; fi'
    job = hpc_mp.submit(where, nodes=2, slurm={"srun_args": ["sh", "-c", late]}, **there)
    with pytest.raises(RunFailed, match=r"exit code 1(43|37)") as failed:
        job.results(60)
    assert "; srun: error: n2: task 1: Exited with exit code 7; no result of task 0, 1; " in str(failed.value)


def test_a_job_that_is_killed_does_not_hang(lab: Lab, there: dict[str, Any]) -> None:
    job = hpc_mp.submit(sleep, **there)
    lab.wait_job(int(job.id), "RUNNING")
    job.cancel()
    with pytest.raises(RunFailed, match=rf"Slurm job {job.id} is CANCELLED"):
        job.results(60)


@pytest.mark.parametrize("trap", [True, False])
def test_an_early_signal_does_not_kill(lab: Lab, there: dict[str, Any], monkeypatch: pytest.MonkeyPatch, trap: bool) -> None:
    if not trap:  # submitit's own way
        monkeypatch.setattr(tasks, "PYTHON", shlex.quote(sys.executable))

    def signalled(turn: int) -> SubmittedJob:
        begun = lab.share / f"begun-{trap}-{turn}"
        job = hpc_mp.submit(early, slurm={"setup": [f"touch {begun}"]}, **there)
        until(begun.exists)
        for _ in range(5):  # python takes longer than that to start
            lab.run(["scancel", "--signal=USR2", job.id])
            time.sleep(0.02)
        return job

    if not trap:
        with pytest.raises(RunFailed, match=r"is FAILED.* task 0: User defined signal 2"):
            signalled(0).results(60)
        return
    # Slurm starts a program with the default for every signal: one that comes in the millisecond before the shell is deaf kills.
    for turn in range(3):
        with suppress(RunFailed):
            assert signalled(turn).result(60) == "alive"
            break
    else:
        pytest.fail("killed three times")


def test_inside_an_allocation(lab: Lab, there: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, and what is said to help does."""
    outer = lab.sbatch("--nodes=1", "--wrap=sleep 60")
    try:
        lab.wait_job(outer, "RUNNING")
        monkeypatch.setenv("SLURM_JOB_ID", str(outer))
        for on in ("auto", "slurm"):
            with pytest.raises(HpcMpError, match=r"inside the live allocation .* env -u SLURM_JOB_ID python"):
                hpc_mp.submit(where, **there | {"on": on})
        assert hpc_mp.submit(where, **there | {"on": "local"}).result(60) == (0, "node0", "127.0.0.1")
        monkeypatch.delenv("SLURM_JOB_ID")
        job = hpc_mp.submit(where, **there)
        assert int(job.id) != outer and job.result(60)[0] == 0
    finally:
        lab.run(["scancel", str(outer)])


def test_what_submitit_and_slurm_refuse(there: dict[str, Any]) -> None:
    with pytest.raises(HpcMpError, match=r"Unavailable parameter.*'colour'.*partition"):
        hpc_mp.submit(sleep, slurm={"colour": "red"}, **there)
    with pytest.raises(RunFailed, match="invalid partition specified: nowhere"):
        hpc_mp.submit(sleep, slurm={"partition": "nowhere"}, **there)
