"""The real command from launch to resume: killed ranks, other layouts, and file systems that fill up."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import warm
from launching import command, environment, mark, until  # noqa: F401  (mark is a fixture)
from layouts import write_job
from slurm_jobs import losses
from tables import table

from hpc_mp.rundir import RunDirectory, read_lines
from hpc_mp.rundir.checkpoints import complete_steps

EXACT = 1e-12
FAULTY = Path(__file__).with_name("faults.py")
TP2PP2 = ["job.nodes=2", "job.ranks_per_node=2", "parallel.tensor=2", "parallel.pipeline=2", "parallel.microbatches=3"]
DP4 = ["job.nodes=2", "job.ranks_per_node=2", "parallel.tensor=1", "parallel.pipeline=1", "parallel.zero=1"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = write_job(tmp_path / "with a space", more="\n[checkpoint]\nevery = 4\n")
    path.write_text(path.read_text().replace("global_batch = 24", "global_batch = 12"))
    return path


def launch(job: Path, mark: str, overrides: Sequence[str], *options: str, code: int = 0) -> dict[str, Any]:  # noqa: F811
    done = warm.Program(command(job, overrides, *options)[1:], environment(mark)).end(240)
    assert done.returncode == code, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def kill_one_rank(job: Path, mark: str, overrides: Sequence[str]) -> tuple[dict[str, Any], float]:  # noqa: F811
    """Launch, kill -9 rank 2 after some steps; returns the launcher's document and how long it took to end."""
    started = warm.Program(command(job, overrides)[1:], environment(mark))
    run = job.parent / "runs" / "exact" / "0001"
    until(lambda: len(read_lines(run / "metrics.jsonl")) >= 6, 120)
    pid = next(line["pid"] for line in read_lines(run / "ranks.jsonl") if line["rank"] == 2)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    done = started.end(120)
    assert done.returncode == 1, done.stderr
    assert "rank 2" in done.stderr and "node1" in done.stderr and "SIGKILL" in done.stderr
    return json.loads(done.stdout), time.monotonic() - killed


@pytest.mark.parametrize(("after", "apart"), [
    pytest.param(TP2PP2, 0.0, id="same layout"), pytest.param(DP4, EXACT, id="another layout", marks=pytest.mark.prove)])
def test_a_killed_rank_ends_the_run_and_a_resume_goes_on_exactly(
    job: Path, mark: str, after: list[str], apart: float,  # noqa: F811
) -> None:
    failed, seconds = kill_one_rank(job, mark, [*TP2PP2, "train.steps=100000"])
    assert failed["state"] == "failed" and seconds < 45
    done = len(losses(failed["run"]))
    assert done >= 6
    steps = f"train.steps={done + 12}"
    whole = losses(launch(job, mark, [*TP2PP2, steps, "job.name=whole"])["run"])
    resumed = launch(job, mark, [*after, steps], "--resume")
    assert resumed["run"] == failed["run"] and resumed["state"] == "completed"
    found = losses(resumed["run"])
    assert len(found) == len(whole) == done + 12
    assert max(abs(a - b) for a, b in zip(found, whole, strict=True)) <= apart


def test_a_run_whose_directory_is_removed_has_failed(job: Path, mark: str) -> None:  # noqa: F811
    overrides = ["job.ranks_per_node=2", "train.steps=100000", "checkpoint.every=2"]
    started = warm.Program(command(job, overrides)[1:], environment(mark))
    run = RunDirectory(job.parent / "runs" / "exact" / "0001")
    until(lambda: len(read_lines(run.metrics)) >= 2, 120)
    run.path.rename(job.parent / "gone")
    done = started.end(120)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert (document["state"], document["checkpoint"]) == ("failed", None)
    assert f"the run directory {run.path} was removed during the run" in document["cause"]["message"]
    assert document["cause"]["message"] in done.stderr and "continue with" not in done.stderr


# In a mount name space of its own a small file system takes the place of $1, with what lies in $2; it is full from one moment
# to another, and $3 gets the lines of metrics then. In the end its names and its metrics are printed.
FULL = table(__file__, "launch_resume.toml", "full")


def on_a_full_disk(directory: Path, saved: Path, begins: str, ends: str, words: list[str], environ: dict[str, str],
                   ) -> subprocess.CompletedProcess[str]:
    """Resume a run whose files, or checkpoints, lie in a directory that is full between two conditions of the shell."""
    shutil.copytree(directory, saved)
    size = 5 * sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    isolate = ["unshare", *(["-m"] if os.geteuid() == 0 else ["-rm"]), "sh", "-ec"]
    if shutil.which("unshare") is None or subprocess.run([*isolate, "mount -t tmpfs none /mnt"], capture_output=True).returncode:
        pytest.skip("no mount name space may be made here (unshare -rm)")
    script = FULL.replace("BEGINS", begins).replace("ENDS", ends)
    return subprocess.run([*isolate, script, "sh", *map(str, (directory, saved, saved.with_name("counts"), size)), *words],
                          env=environ, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("freed", [
    pytest.param(True, id="freed"), pytest.param(False, id="stays full", marks=pytest.mark.prove)])
def test_a_full_checkpoint_directory_fails_saves_but_not_training(
    job: Path, tmp_path: Path, mark: str, freed: bool,  # noqa: F811
) -> None:
    run = RunDirectory(Path(launch(job, mark, ["job.ranks_per_node=2", "train.steps=4"])["run"]))
    # Ranks that take a few milliseconds for a step wait until there is space again, where there will be.
    waits = {"FAULT": "held", "FAULT_RANK": "0,1", "FAULT_STEP": "20",
             "FAULT_FILE": str(run.checkpoints / "ballast") if freed else ""}
    words = [sys.executable, str(FAULTY), *command(job, ["job.ranks_per_node=2", "train.steps=32"], "--resume")[3:]]
    ends = f"grep -q {'FAILED' if freed else 'never'} '{run.main_log}'"
    done = on_a_full_disk(run.checkpoints, tmp_path / "saved", "true", ends, words, environment(mark, FAULTY.parent, **waits))
    log = run.main_log.read_text()
    assert "checkpoint of step 8 FAILED" in log and "No space left on device" in log
    # Every fourth step is saved: training goes on after one failed save, and ends with the second in a row (checkpoint.failures).
    assert len(losses(run.path)) == (32 if freed else 12), done.stderr
    assert done.returncode == (0 if freed else 1), done.stderr
    kept = [line for line in done.stderr.splitlines() if line.startswith("step-")]
    assert kept == (["step-00000028", "step-00000032"] if freed else ["step-00000004"])
    # the earlier checkpoint, untouched on disk below the mount, resumes
    assert [path.name for path in complete_steps(run.checkpoints)] == ["step-00000004"]
    again = launch(job, mark, ["job.ranks_per_node=2", "train.steps=6"], "--resume")
    assert again["state"] == "completed" and len(losses(run.path)) == 6


@pytest.mark.prove
def test_metrics_that_a_full_disk_refuses_are_written_later(job: Path, tmp_path: Path, mark: str) -> None:  # noqa: F811
    overrides = ["job.ranks_per_node=2", "checkpoint.every=0"]
    run = RunDirectory(Path(launch(job, mark, [*overrides, "train.steps=4"])["run"]))
    still = '{ before=$(lines "$1"); sleep 0.6; [ "$(lines "$1")" = "$before" ]; }'  # the last page may hold some more lines
    words = command(job, [*overrides, "train.steps=110"], "--resume")
    done = on_a_full_disk(run.path, tmp_path / "saved", '[ "$(lines "$1")" -ge 10 ]', still, words, environment(mark))
    steps = [json.loads(line)["step"] for line in done.stderr.splitlines() if line.startswith('{"step"')]
    assert done.returncode == 0, done.stderr
    assert 10 <= int((tmp_path / "counts").read_text()) < 110, "for a while nothing could be written"
    assert steps == list(range(1, 111))
