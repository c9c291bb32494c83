"""``hpc-mp status``, ``logs`` and ``cancel`` of runs on emulated nodes and of run directories as jobs leave them."""

import fcntl
import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from launching import call, environment, executable, held, make_run, mark, record, the_run, until, write_job
from played_slurm import FAKE_CLI

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.cli.status import single_text
from hpc_mp.cluster.bad_nodes import BadNode, write_exclusions
from hpc_mp.cluster.slurm.jobs import FORGOTTEN, UNKNOWN, SlurmJob, explained
from hpc_mp.job import load_job
from hpc_mp.launch.backends import BACKENDS
from hpc_mp.rundir import RunDirectory, write_json
from hpc_mp.rundir.plan import RunPlan, Traffic, write_plan
from hpc_mp.rundir.records import RankStart, StepMetrics, line_of, read_records
from hpc_mp.runs.keepers import KEEPERS
from hpc_mp.runs.lock import RunHolder, hold, holder
from hpc_mp.runs.lock import held as is_held
from hpc_mp.runs.status import _state, seen

__all__ = ["mark"]  # a fixture


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of 5 steps that has just been made."""
    return make_run(load_job(write_job(tmp_path)))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put programs of Slurm on PATH, which say these words."""
    def played(**words: str) -> None:
        for name, said in words.items():
            executable(tmp_path / "bin", name, f"printf '%s\\n' {said}" if said else "exit 1")
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    return played


def ended(run: RunDirectory, state: str, message: str | None = None) -> None:
    write_json(run.outcome, {"attempt": 1, "state": state, "cause": message and {"message": message}})


def status(run: RunDirectory) -> dict[str, Any]:
    result = call("status", run.path, "--json")
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def rows(run: RunDirectory, jobs: list[SlurmJob]) -> list[tuple[str, str]]:
    """Return the name and the text of each line about a run."""
    return [(line[:9].strip(), line[10:]) for line in single_text([seen(run, jobs)]).splitlines()]


def test_status_names_whom_we_exclude_and_why(run: RunDirectory) -> None:
    write_exclusions(run.excluded, [BadNode("n3", "lost", "n3 gave no sign of life", "/runs/t/0001", 0.0, 1e12)])
    for state, shown in (("PENDING", True), ("RUNNING", True), ("FAILED", False)):
        words = dict(rows(run, [SlurmJob("7", state)]))
        assert ("n3, excluded by hpc-mp since 1970-01-01" in words.get("without", "")) == shown
        assert not shown or ": n3 gave no sign of life" in words["without"]


def test_a_run_that_failed_names_its_logs_and_how_to_go_on(run: RunDirectory) -> None:
    ended(run, "failed", "boom")
    for place, on in (("local", " --on local"), ("mpi", " --on mpi"), ("slurm", ""), ("step", "")):
        write_plan(run, RunPlan((1,), Traffic(), (), place=place))
        shown = rows(run, [])
        assert shown[-3:] == [("logs", f"hpc-mp logs {run.path}"), ("continue", f"hpc-mp launch {run.job}{on} --resume"),
                              ("cause", "boom")]
    ended(run, "completed")
    assert not {"logs", "continue"} & dict(rows(run, [])).keys()


def trained(run: RunDirectory, steps: int, attempt: int = 1) -> None:
    with open(run.metrics, "a") as file:
        file.writelines(record(step, attempt, 2.0, 9.0 - step) + "\n" for step in range(1, steps + 1))


def failed(run: RunDirectory, rank: int, kind: str, message: str, when: float = 1.0, attempt: int = 1, **more: Any) -> None:
    write_json(run.failure(attempt, rank), {
        "attempt": attempt, "rank": rank, "node": f"n{rank // 2}", "host": f"host{rank // 2}", "pid": 1, "time": when,
        "kind": kind, "message": message, "traceback": f"Traceback of rank {rank}\n", **more})


def started(run: RunDirectory, rank: int, node: str, attempt: int = 1, **more: int) -> None:
    with open(run.ranks, "a") as file:
        file.write(line_of(RankStart(attempt, rank, node, f"host-{node}", 0.0, local_rank=rank % 2, pp=rank // 2, tp=rank % 2,
                                     **more)) + "\n")


# --- status of emulated nodes -------------------------------------------------------------------------------------


def test_a_run_that_goes_on(run: RunDirectory) -> None:
    trained(run, 2)
    write_json(run.path / "status.json", {"attempt": 1, "phase": "training"})
    with held(run):
        found = status(run)
        text = call("status", run.path).output
    assert (found["state"], found["phase"], found["step"], found["steps"], found["loss"]) == ("running", "training", 2, 5, 7.0)
    assert found["eta"] == 6.0 and 0 <= found["step_age"] < 30 and found["job"] is None and found["cause"] is None
    assert "step      2/5, loss 7.0000, 50 tokens/s, the last " in text and "about 6 s left" in text
    assert found["mfu"] is None
    on_gpus = replace(read_records(run.metrics, StepMetrics)[-1], step=3, mfu=0.413)
    with open(run.metrics, "a") as file:
        file.write(line_of(on_gpus) + "\n")
    assert status(run)["mfu"] == 0.413
    assert "step      3/5, loss 7.0000, 50 tokens/s, MFU 41.3 %" in call("status", run.path).output
    found = status(run)
    assert found["state"] == "failed" and "without a word" in found["cause"], "its launcher was killed"


def test_a_run_that_is_done(run: RunDirectory) -> None:
    """There is nothing to cancel."""
    assert json.loads(call("status", run.path.parent, "--json").stdout)["run"] == str(run.path), "the newest of its name"
    trained(run, 5)
    (run.checkpoints / "step-00000005").mkdir()
    ended(run, "completed")
    found = status(run)
    assert (found["state"], found["step"], found["eta"]) == ("completed", 5, None)
    assert found["checkpoint"] == str(run.checkpoints / "step-00000005")
    result = call("cancel", run.path)
    assert (result.exit_code, result.output) == (0, "nothing to do: the run is completed\n") and not run.stop.exists()


def test_a_loss_that_is_no_number_is_null(run: RunDirectory) -> None:
    for losses, loss in (((float("nan"),), None), ((3.0, float("nan")), 3.0)):  # of the last step that has one
        run.metrics.write_text("".join(record(step, loss=each) + "\n" for step, each in enumerate(losses, 1)))
        assert status(run)["loss"] == loss


# --- what Slurm and the run directory say together -------------------------------------------------------------


@pytest.mark.parametrize(("slurm", "left", "state"), [
    ("PENDING", None, "pending"), ("RUNNING", None, "running"), ("COMPLETING", "completed", "completed"),
    ("COMPLETED", None, "completed"), ("COMPLETED", "stopped", "stopped"), ("FAILED", None, "failed"),
    ("NODE_FAIL", None, "failed"), ("CANCELLED", None, "stopped"), (FORGOTTEN, "completed", "completed"),
    (FORGOTTEN, None, "failed"), (UNKNOWN, None, "unknown"), (UNKNOWN, "failed", "failed")])
def test_states(run: RunDirectory, slurm: str, left: str | None, state: str) -> None:
    if left is not None:
        ended(run, left)
    assert seen(run, [SlurmJob("7", slurm)]).state == state
    if (slurm, left) == (FORGOTTEN, None):  # as Slurm forgets the jobs of an array that never started
        assert _state(SlurmJob("7_3", FORGOTTEN), None, False, True) == "stopped", "it was cancelled as it waited"


@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl", "log/rank-00000.log", "log/node-n1.log"])
def test_a_job_that_its_controller_has_lost_goes_on_where_its_ranks_write(run: RunDirectory, name: str) -> None:
    file = run.path / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    assert seen(run, [SlurmJob("7", FORGOTTEN)]).state == "unknown"
    assert seen(run, [SlurmJob("7", "NODE_FAIL")]).state == "failed"
    os.utime(file, (1e9, 1e9))
    assert seen(run, [SlurmJob("7", FORGOTTEN)]).state == "failed"


def test_a_chain_is_where_its_first_unfinished_job_is(run: RunDirectory) -> None:
    found = seen(run, [SlurmJob("7", "TIMEOUT"), SlurmJob("8", "RUNNING"), SlurmJob("9", "PENDING")])
    assert found.state == "running" and found.job and found.job.id == "8" and [job.id for job in found.successors] == ["9"]


def test_how_slurm_ended_it_where_nobody_else_says(run: RunDirectory) -> None:
    cause = seen(run, [explained(SlurmJob("7", "FAILED", "NonZeroExitCode", exit_code=3))]).cause
    assert cause == "Slurm job 7 ended as FAILED, the job script ended with exit code 3 (the job script ended with an error)"
    run.slurm_log("7").write_text("hpc-mp: 15:11:38 attempt 1 (7.0.1) on n1, n2; rank map: in Slurm's order of hosts\n")
    killed = seen(run, [explained(SlurmJob("7", "FAILED", "JobLaunchFailure", exit_code=-9))]).cause
    assert killed is not None and killed.startswith("Slurm job 7 ended as FAILED, the job script was killed by SIGKILL"), killed
    assert "could not start" not in killed and "rank map" not in killed


def test_a_job_that_waits_says_why(run: RunDirectory, programs: Callable[..., None]) -> None:
    run.job_id.write_text("7\n")
    write_json(run.successors, ["7", "8"])
    programs(squeue="'7|PENDING|2030-01-01T10:00:00||1|0|QOSMaxGRESPerUser|' '8|PENDING|N/A||0|0|Dependency|'")
    text = call("status", run.path).output
    assert "state     pending\njob       7 PENDING, expected to start 2030-01-01 10:00:00, started again once\n" in text
    assert "waits     QOSMaxGRESPerUser: with it you would use more GPUs" in text and "remedy    wait until jobs" in text
    assert "then      8 PENDING" in text


def test_a_job_that_can_never_start_says_what_it_asks_too_much_of(run: RunDirectory, programs: Callable[..., None]) -> None:
    run.job_id.write_text("7\n")
    programs(squeue="'7|PENDING|N/A||0|0|PartitionConfig|'", sinfo="'all*|up|infinite|4|4000|(null)|n1'", scontrol="")
    text = call("status", run.path).output
    assert "waits     PartitionConfig: 2 nodes asked, the partition has 1\n" in text
    assert "remedy    cancel it and launch again with another job.nodes: use 1 or fewer" in text and "ranks_per_node" not in text
    programs(sinfo="'all*|up|infinite|4|4000|(null)|n[1-2]'")
    assert "waits     PartitionConfig: no nodes of its partition" in call("status", run.path).output


# --- logs ---------------------------------------------------------------------------------------------------------


def test_the_cause_is_the_last_thing_in_the_logs(run: RunDirectory) -> None:
    run.main_log.write_text("training\n")
    (run.path / "slurm-7.log").write_text("srun: error: n1: task 3: Exited\n")
    started(run, 3, "n1")
    failed(run, 2, "peer", "Connection reset", when=0.5)
    failed(run, 3, "error", "ValueError: boom")
    assert status(run)["cause"] == "rank 3 (dp 0, pp 1, tp 1) on n1 failed: ValueError: boom"
    lines = call("logs", run.path).output.splitlines()
    assert "training" in lines and "srun: error: n1: task 3: Exited" in lines and "Traceback of rank 3" in lines
    assert lines[-1] == "rank 3 (dp 0, pp 1, tp 1) on n1 failed: ValueError: boom"
    run.slurm_log("7").unlink()
    ended(run, "completed")
    assert call("logs", run.path).output == "training\n", "no cause where all went well"


def test_a_rank_and_a_node(run: RunDirectory) -> None:
    """Of Slurm, whose ranks write into the log of their node, and of the emulator."""
    run.node_log("n1").write_text(" 2: two\n10: ten\n 2: \n10: more: ten\nslurmstepd: error\n")
    started(run, 5, "n1", task=10)
    started(run, 4, "n1", task=2)
    for rank in (0, 1, 2):
        run.rank_log(rank).write_text(f"words of {rank}\n")
        started(run, rank, f"node{rank // 2}")
    with held(run):
        for option, name, words in (
                ("--rank", "5", "ten\nmore: ten\n"), ("--rank", "4", "two\n\n"), ("--node", "n1", run.node_log("n1").read_text()),
                ("--rank", "2", "words of 2\n"), ("--node", "node0", "0: words of 0\n1: words of 1\n"),
                ("--node", "host-node1", "2: words of 2\n")):
            assert call("logs", run.path, option, name).output == words


def test_what_is_not_there_is_named(run: RunDirectory) -> None:
    for rank in (0, 1):
        started(run, rank, "node0")
    for words, said in (("--rank 9", "--rank 9: has no log; attempt 1 has started ranks 0, 1"),
                        ("--node x", "--node x: has no log; attempt 1 has started nodes node0"),
                        ("--attempt 2", "--attempt 2: there are attempts 1 to 1"), ("--rank 0 --node x", "exclude each other")):
        with pytest.raises(HpcMpError, match=said):
            call("logs", run.path, *words.split())


def test_an_earlier_attempt(run: RunDirectory) -> None:
    """Its outcome does not count."""
    (run.path / "attempts" / "1" / "log").mkdir(parents=True)
    (run.path / "attempts" / "1" / "log" / "main.log").write_text("first\n")
    ended(run, "failed", "boom")
    failed(run, 0, "error", "ValueError: boom")
    run.main_log.write_text("second\n")
    with held(run):
        found = status(run)
        assert call("logs", run.path).output == "second\n"
        first = call("logs", run.path, "--attempt", "1").output
    assert (found["state"], found["attempt"], found["cause"]) == ("running", 2, None)
    assert first.startswith("first\n") and first.endswith("failed: ValueError: boom\n")


def test_following_to_the_end(run: RunDirectory) -> None:
    run.main_log.write_text("one\nhal")

    def go_on() -> None:
        time.sleep(1)
        with open(run.main_log, "a") as log:
            log.write("f\nlast\n")
        ended(run, "failed", "rank 0 was killed")

    with held(run):
        writer = threading.Thread(target=go_on)
        writer.start()
        lines = call("logs", run.path, "--follow").output.splitlines()
        writer.join()
    assert lines == ["one", "half", "last", "", "rank 0 was killed"]


# --- cancel -------------------------------------------------------------------------------------------------------


def test_cancel_lets_ranks_save(run: RunDirectory) -> None:
    """A launcher and its ranks played by a thread that ends the run when it sees the trigger file."""
    def ranks() -> None:
        until(run.stop.exists)
        ended(run, "stopped")
        fcntl.flock(lock, fcntl.LOCK_UN)

    with held(run) as lock:
        thread = threading.Thread(target=ranks)
        thread.start()
        result = call("cancel", run.path, "--json")
        thread.join()
    assert json.loads(result.stdout)["state"] == "stopped" and "save at the next step" in result.stderr


@pytest.mark.parametrize("options", [["--now"], ["--grace", "1"]])
def test_cancel_ends_emulated_ranks_that_do_not_stop(tmp_path: Path, mark: str, options: list[str]) -> None:
    job = write_job(tmp_path)
    launch = warm.Program([FAKE_CLI, "launch", job, "--on", "local"], environment(mark, DEED="hang_deaf", SLURM_PROCID=""))
    run = the_run(job)
    until(lambda: len(list(run.path.glob("ready-*"))) == 4)
    assert status(run)["state"] == "running"
    result = call("cancel", run.path, *options)
    assert result.exit_code == 0 and "ended the ranks" in result.output
    assert launch.outcome()[0] == 1
    assert status(run)["state"] in ("stopped", "failed")
    assert os.path.exists(run.stop)


def test_a_run_that_ends_meanwhile_is_sent_nothing(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher may be at the next run of a sweep, which a signal would end."""
    with held(run) as lock, subprocess.Popen(["sleep", "60"]) as launcher:
        def holder(_: RunDirectory) -> RunHolder:
            fcntl.flock(lock, fcntl.LOCK_UN)  # while the launcher is looked up
            return RunHolder(platform.node(), launcher.pid, psutil.Process(launcher.pid).create_time())

        monkeypatch.setattr("hpc_mp.runs.keepers.holder", holder)
        result = call("cancel", run.path, "--now")
        assert result.exit_code == 0 and launcher.poll() is None, result.output
        launcher.kill()


@pytest.mark.parametrize(("host", "age", "words"), [
    ("elsewhere", 0.0, "process {pid} on elsewhere"), (platform.node(), 60.0, f"process {{pid}} on {platform.node()}"),
    ("", 0.0, "an unknown process")])
def test_a_launcher_that_is_not_here_is_sent_nothing(run: RunDirectory, host: str, age: float, words: str) -> None:
    """It runs on another host, or its number is another process's by now."""
    with open(run.lock, "w") as lock, subprocess.Popen(["sleep", "60"]) as other:
        if host:
            print(host, other.pid, psutil.Process(other.pid).create_time() - age, file=lock, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunFailed, match=f"is held by {words.format(pid=other.pid)}, which cannot be reached"):
            call("cancel", run.path, "--now")
        assert other.poll() is None
        other.kill()


def test_the_launcher_that_holds_a_run_is_known(run: RunDirectory) -> None:
    with hold(run):
        launcher = holder(run)
        assert launcher is not None and launcher.process() == psutil.Process()
    assert KEEPERS.keys() == BACKENDS.keys(), "every back end looks after its runs"


def test_a_launcher_that_proc_does_not_show_holds_its_run(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process namespace of its own with another's /proc: nobody there can send it a signal by number."""
    def hidden(pid: int | None = None) -> psutil.Process:
        raise psutil.NoSuchProcess(pid or os.getpid())

    monkeypatch.setattr("hpc_mp.runs.lock.psutil.Process", hidden)
    with hold(run):
        assert is_held(run) and holder(run) is None
