"""``status``, ``logs``, ``cancel`` and the queue on a real Slurm, with tiny jobs, without accounting and with it."""

import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from launching import executable, until, write_job
from slurm_lab.lab import Lab
from slurm_lab.why_not import why_not
from tables import table

from hpc_mp.base.command import CommandFailed
from hpc_mp.cli.main import cli
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm import submit as slurm
from hpc_mp.cluster.slurm.jobs import FORGOTTEN, parse_scontrol
from hpc_mp.job import dump_job, load_job
from hpc_mp.rundir import RunDirectory, write_json

# Ranks played by bash: they go on until they are asked to stop, save, and say so.
RANKS = table(__file__, "verbs_slurm.toml", "ranks")
OBEY = "until [ -e {run}/stop ]; do sleep 0.2; done; mkdir -p {run}/checkpoints/step-00000003; exit 75"


@pytest.fixture(scope="module", params=[
    pytest.param(False, id="no accounting"), pytest.param(True, id="slurmdbd", marks=pytest.mark.prove)])
def cluster(request: pytest.FixtureRequest) -> Iterator[Lab]:
    if not request.param:
        yield request.getfixturevalue("lab")
        return
    reason = why_not(accounting=True)
    if reason:
        pytest.skip(reason)
    with Lab(2, accounting=True) as lab:
        yield lab


@pytest.fixture
def run(cluster: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """A run directory on the cluster's shared disk; what a test submits is ended after it."""
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    run = RunDirectory(cluster.share / tmp_path.name / "t" / "0001")
    for name in ("log", "failures", "checkpoints", "attempts"):
        (run.path / name).mkdir(parents=True)
    run.job.write_text(dump_job(load_job(write_job(tmp_path))))
    write_json(run.placement, {})
    yield run
    cluster.run(["scancel", "--user=root", "--full"])
    cluster.run(["scancel", "--user=root"])
    cluster.wait_idle()


def submitted(cluster: Lab, run: RunDirectory, deed: str, *options: str) -> str:
    run.script.write_text(RANKS.format(run=run.path, deed=deed.format(run=run.path)))
    job_id = str(cluster.sbatch("--nodes=1", "--ntasks=2", f"--output={run.path}/slurm-%j.log", *options, str(run.script)))
    (run.path / "job.id").write_text(f"{job_id}\n")
    return job_id


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in arguments], catch_exceptions=False)


def status(run: RunDirectory) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(call("status", run.path, "--json").stdout)
    return document


def all_run(run: RunDirectory) -> bool:
    """Whether both ranks have come so far that no signal ends them."""
    said = call("logs", run.path).output
    return "task 0 runs" in said and "task 1 runs" in said


def test_a_job_from_its_queue_to_its_end(cluster: Lab, run: RunDirectory) -> None:
    job_id = submitted(cluster, run, OBEY, "--hold")
    found = status(run)
    assert (found["state"], found["job"]["id"], found["job"]["reason"]) == ("pending", job_id, "JobHeldUser")
    assert found["job"]["remedy"] == f"scontrol release {job_id}"
    cluster.run(["scontrol", "release", job_id], check=True)
    cluster.wait_job(int(job_id), "RUNNING")
    found = status(run)
    assert (found["state"], found["job"]["nodes"], found["job"]["restarts"]) == ("running", ["n1"], 0)
    assert re.search(rf"job +{job_id} RUNNING, started .* on n1\n", call("status", run.path).output)
    run.stop.touch()
    cluster.wait_job(int(job_id))
    found = status(run)
    assert (found["state"], found["job"]["state"], found["job"]["exit_code"]) == ("stopped", "FAILED", 75)


def test_why_it_waits(cluster: Lab, run: RunDirectory) -> None:
    submitted(cluster, run, OBEY, "--begin=now+1hour")
    until(lambda: status(run)["job"]["reason"] == "BeginTime")
    assert "remedy    wait" in call("status", run.path).output
    assert status(run)["job"]["start"] > time.time() + 3000


def test_a_failed_job_ends_its_logs_with_the_cause(cluster: Lab, run: RunDirectory) -> None:
    record = {"attempt": 1, "rank": 1, "node": "n1", "host": "n1", "time": 1.0, "kind": "error", "pid": 1, "dp": 0, "pp": 1,
              "cp": 0, "tp": 0, "message": "ValueError: boom", "traceback": "Traceback: boom\n"}
    (run.path / "ready.json").write_text(json.dumps(record))
    cluster.wait_job(int(submitted(cluster, run, "cp {run}/ready.json {run}/failures/attempt-1-rank-00001.json; exit 1")))
    lines = call("logs", run.path, "--follow").output.splitlines()
    assert "task 1 runs" in lines and any("srun: error" in line for line in lines)
    assert lines[-1] == "rank 1 (dp 0, pp 1, tp 0) on n1 failed: ValueError: boom"
    assert status(run)["cause"] == lines[-1]


def test_a_job_that_says_nothing(cluster: Lab, run: RunDirectory) -> None:
    job_id = submitted(cluster, run, "exit 3")
    cluster.wait_job(int(job_id))
    assert status(run)["cause"].startswith(f"Slurm job {job_id} ended as FAILED, the job script ended with exit code 3")


def test_cancel_lets_a_running_job_save(cluster: Lab, run: RunDirectory) -> None:
    job_id = submitted(cluster, run, OBEY)
    after = str(cluster.sbatch(f"--dependency=afterany:{job_id}", "--wrap=hostname"))
    write_json(run.path / "successors.json", [job_id, after])
    until(lambda: all_run(run))
    assert [job["id"] for job in status(run)["successors"]] == [after]
    result = call("cancel", run.path, "--json")
    document = json.loads(result.stdout)
    assert document["state"] == "stopped" and document["checkpoint"].endswith("step-00000003")
    assert "save at the next step" in result.stderr and f"cancelled Slurm job {after}" in result.stderr
    assert cluster.job(int(after))["JobState"] == "CANCELLED"
    assert cluster.job(int(job_id))["JobState"] != "CANCELLED"  # it ended by itself
    assert call("cancel", run.path).output == "nothing to do: the run is stopped\n"


@pytest.mark.parametrize(("options", "least"), [(["--now"], 0.0), (["--grace", "3"], 3.0)])
def test_cancel_ends_a_job_that_does_not_stop(cluster: Lab, run: RunDirectory, options: list[str], least: float) -> None:
    job_id = submitted(cluster, run, "while :; do sleep 1; done")
    until(lambda: all_run(run))
    start = time.monotonic()
    result = call("cancel", run.path, *options)
    assert result.exit_code == 0 and f"ended Slurm job {job_id}" in result.output
    assert time.monotonic() - start >= least
    assert cluster.wait_job(int(job_id))["JobState"] == "CANCELLED" and status(run)["state"] == "stopped"


def test_cancel_a_job_that_waits(cluster: Lab, run: RunDirectory) -> None:
    job_id = submitted(cluster, run, OBEY, "--hold")
    result = call("cancel", run.path)
    assert result.exit_code == 0 and f"cancelled Slurm job {job_id}, which had not started" in result.output
    assert status(run)["state"] == "stopped" and run.stop.exists()


def test_slurm_has_forgotten_the_job(cluster: Lab, run: RunDirectory) -> None:
    (run.path / "job.id").write_text("99999\n")
    assert queue.job_states(["99999"])["99999"].state == FORGOTTEN
    assert status(run)["state"] == "failed"
    write_json(run.path / "outcome.json", {"attempt": 1, "state": "completed", "cause": None})
    assert status(run)["state"] == "completed"


def test_arrays_and_heterogeneous_jobs(cluster: Lab, run: RunDirectory) -> None:
    array = str(cluster.sbatch("--array=0-2%1", "--wrap=sleep 600"))
    het = str(cluster.sbatch("--ntasks=1", ":", "--ntasks=1", "--wrap=sleep 600"))
    until(lambda: all(job.state == "RUNNING" for job in queue.job_states([array, het]).values()))
    until(lambda: queue.job_states([f"{array}_2"])[f"{array}_2"].reason == "JobArrayTaskLimit")  # once it was tried
    jobs = queue.job_states([array, f"{array}_0", f"{array}_2", het])
    assert [part.id for part in jobs[array].parts] == [f"{array}_0", f"{array}_[1-2%1]"]
    assert (jobs[f"{array}_0"].state, jobs[f"{array}_2"].state, jobs[f"{array}_2"].reason) == (
        "RUNNING", "PENDING", "JobArrayTaskLimit")
    assert [part.id for part in jobs[het].parts] == [f"{het}+0", f"{het}+1"]
    (run.path / "job.id").write_text(f"{array}_2\n")
    assert status(run)["state"] == "pending"


def test_each_program_says_the_same(cluster: Lab, run: RunDirectory) -> None:
    """Lines and scontrol of one moment, with jobs that run, wait, failed and were killed."""
    ids = [str(cluster.sbatch(*options)) for options in (
        ("--wrap=sleep 600",), ("--hold", "--wrap=true"), ("--wrap=exit 3",), ("--wrap=kill -9 $$",))]
    for job_id in ids[2:]:
        cluster.wait_job(int(job_id))
    cluster.wait_job(int(ids[0]), "RUNNING")
    lines = queue.job_states(ids)
    shown = {job_id: parse_scontrol(queue.patient(("scontrol", "show", "job", "--oneliner", job_id)))[0] for job_id in ids}
    assert [lines[job_id] for job_id in ids] == [shown[job_id] for job_id in ids]
    assert [lines[job_id].exit_code for job_id in ids] == [None, None, 3, -9]
    if cluster.accounting:
        late = until(lambda: (found := {job.id: job for job in queue._sacct(ids, queue.patient)}) and len(found) == 2 and found)
        assert [late[job_id].exit_code for job_id in ids[2:]] == [3, -9]
    else:
        with pytest.raises(CommandFailed):
            queue._sacct(ids, queue.patient)


def test_waiting_for_several_jobs(cluster: Lab, run: RunDirectory) -> None:
    asked: list[tuple[str, ...]] = []
    pauses: list[float] = []

    def ask(argv: Any) -> str:
        asked.append(tuple(argv))
        return queue.patient(argv)

    def pause(_: Any, seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    ends = queue.wait([str(cluster.sbatch(f"--wrap=sleep {seconds}")) for seconds in (0, 3)], pause, ask)
    assert {job.state for job in ends.values()} == {"COMPLETED"}
    rarely = itertools.chain(queue.DELAYS_S, itertools.repeat(queue.DELAYS_S[-1]))
    assert pauses == list(itertools.islice(rarely, len(pauses))) != [], "ever more rarely"
    assert len(asked) == len(pauses) + 1 and all(argv[0] == "squeue" for argv in asked), "one question for all of them"


def test_the_words_of_a_submit_plugin(cluster: Lab, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's own sbatch, behind what a site puts before it."""
    greeting = "sbatch: INFO your project has 3 h left"
    executable(tmp_path / "bin", "sbatch", f"echo '{greeting}' >&2; exec {shutil.which('sbatch')} \"$@\"")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.chdir(cluster.share)
    (run.path / "ok.sh").write_text("#!/bin/sh\ntrue\n")
    submission = slurm.sbatch(run.path / "ok.sh", ["--output=/dev/null"])
    assert submission.words == greeting
    assert cluster.wait_job(int(submission.job_id))["JobState"] == "COMPLETED"


def test_following_from_the_queue(cluster: Lab, run: RunDirectory) -> None:
    """``logs --follow`` begins while the job waits, and ends with it."""
    job_id = submitted(cluster, run, "exit 3", "--hold")
    threading.Timer(1.0, lambda: cluster.run(["scontrol", "release", job_id])).start()
    lines = call("logs", run.path, "--follow").output.splitlines()
    assert "task 0 runs" in lines and lines[-1].startswith(f"Slurm job {job_id} ended as FAILED")


def test_init_finds_account_qos_and_limits(cluster: Lab, run: RunDirectory) -> None:
    if not cluster.accounting:
        result = call("init", run.path / "new.toml")
        assert result.exit_code == 0 and "no accounting" in result.output
        assert "partition   all (default) ← used" in result.output
        assert load_job(run.path / "new.toml").slurm.account is None
        return
    for command in ("add qos short set MaxWall=00:10:00 MaxTRESPerUser=node=1 MaxJobsPerUser=2",
                    "modify user root set qos=normal,short defaultqos=short"):
        cluster.run(["sacctmgr", "--immediate", *command.split()], check=True)
    result = call("init", run.path / "new.toml")
    assert "account root (others: acc)" in result.output
    assert "QOS         short (your default): at most 00:10:00 per job; 2 jobs at once; 1 node at once" in result.output
    spec = load_job(run.path / "new.toml")
    assert (spec.slurm.account, spec.slurm.qos, spec.job.time_limit, spec.job.nodes) == ("root", None, "00:10:00", 1)
    cluster.run(["scontrol", "update", "PartitionName=all", "AllowQos=normal"], check=True)
    result = call("init", run.path / "other.toml")
    assert "QOS         normal (the partition refuses your default)" in result.output
    assert load_job(run.path / "other.toml").slurm.qos == "normal"
