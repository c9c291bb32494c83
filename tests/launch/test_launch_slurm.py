"""``hpc-mp launch`` on Slurm, played by scripts on PATH."""

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from launching import make_run, record, said, the_run, until
from played_slurm import Cluster
from tables import table

from hpc_mp.cluster.bandwidth import LinkRates, read_measured, where, write_measured
from hpc_mp.job import load_job
from hpc_mp.rundir import RunDirectory
from hpc_mp.runs.status import overview

STEP = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host[7-8]"}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_job_is_submitted(cluster: Cluster, job: Path, mark: str) -> None:
    code, out, err = cluster.launch(mark, job, "--on", "auto", "--json")
    run = the_run(job)
    assert code == 0 and "in a new Slurm job (scontrol ping answers; not inside an allocation)" in " ".join(err.split())
    document = json.loads(out)
    assert (document["run"], document["state"], document["job_id"]) == (str(run.path), "submitted", "4242")
    assert document["report"] is None and document["cause"] is None
    assert (cluster.folder / "submitted").read_text() == f"--parsable {run.script}\n"
    assert (run.path / "job.id").read_text() == "4242\n"
    assert f"watch     hpc-mp status {run.path} --follow\n" in err
    assert 'device = "cpu"' in run.job.read_text()  # the partition lists no GPUs
    cluster.is_state("PENDING")
    code, _, err = cluster.launch(mark, job, "--on", "slurm", "--resume")
    assert code == 2 and "is Slurm job 4242, which is PENDING" in err


def test_a_refused_job(cluster: Cluster, job: Path, mark: str) -> None:
    """Slurm's words are kept, and of a new run nothing else; a run that was there has them as its status."""
    code, _, _ = cluster.launch(mark, job, "--on", "slurm")
    assert code == 0
    cluster.is_state("CANCELLED")
    words = "sbatch: error: invalid partition specified: x"
    cluster.says("sbatch", f"case $1 in --test-only) exit 0;; esac; echo '{words}' >&2; exit 1")
    code, out, err = cluster.launch(mark, job, "--on", "slurm", "--json")
    assert code == 2 and words in err and "--resume" not in err and "Traceback" not in err
    assert json.loads(out)["state"] == "refused" and words in json.loads(out)["error"]["rule"]
    assert [path.name for path in the_run(job).path.parent.iterdir()] == ["0001"]
    code, _, err = cluster.launch(mark, job, "--on", "slurm", "--resume")
    assert code == 2 and words in err and words in overview(the_run(job)).cause
    shutil.rmtree(job.parent / "runs")
    cluster.launch(mark, job, "--on", "slurm", "--set", 'sweep.runs=[{ "train.seed" = 1 }, { "train.seed" = 2 }]')
    assert not (job.parent / "runs").exists()


@pytest.mark.parametrize(("answer", "node", "code", "words"), table(__file__, "launch_slurm.toml", "tested"))
def test_slurm_tests_the_script(cluster: Cluster, job: Path, mark: str, answer: str, node: str, code: int, words: str) -> None:
    """Before anything is written, and at a dry run; with a node that is drained a job may wait for it."""
    cluster.says("sinfo", 'case "$*" in *--Node*) echo "n1|' + node + '|x"; echo "n2|idle|none";; '
                 '*) echo "gpu*|up|1-00:00:00|64|512000|(null)|n[1-4]";; esac')
    cluster.says("sbatch", f'case "$*" in *--test-only*) cat > {cluster.folder}/tested; echo "{answer}" >&2; exit 1;; '
                 "esac; echo 4242")
    for options in (["--dry-run"], []):
        found, out, err = cluster.launch(mark, job, "--on", "slurm", *options)
        assert found == code and words in " ".join((out + err).split())
    assert (cluster.folder / "tested").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=t")
    assert (job.parent / "runs").exists() == (code == 0)


def test_a_run_gets_the_rates_of_its_cluster(cluster: Cluster, job: Path, mark: str) -> None:
    """They go with the run, for the host that puts its nodes in order; the next launch of the run has those of its own time."""
    cluster.is_named()
    cluster.is_state("CANCELLED")  # so that the run may be launched again
    state = {"XDG_STATE_HOME": str(cluster.folder / "state home")}
    rates = LinkRates("lab", time.time() - 3 * 86400, ("n1", "n2", "n3"), ((0, 1, 25.0), (0, 2, 25.0), (1, 2, 9.5)))
    write_measured(where("lab", state), rates)
    _, out, _ = cluster.launch(mark, job, "--on", "slurm", **state)
    said = " ".join(out.split())
    assert "at the 25 GB/s measured 3 d ago; slow links will carry the least" in said
    assert "n2–n3 has 38 % of the usual rate" in said
    assert read_measured(the_run(job).measured) == rates
    where("lab", state).unlink()
    cluster.launch(mark, job, "--on", "slurm", "--resume", **state)
    assert the_run(job).attempt() == 2 and not the_run(job).measured.exists()


@pytest.mark.parametrize(("left", "state", "code", "figures", "words"), table(__file__, "launch_slurm.toml", "ends"))
def test_waiting_for_the_end_of_a_job(cluster: Cluster, job: Path, mark: str, tmp_path: Path, left: str, state: str, code: int,
                                      figures: dict[str, Any], words: str) -> None:
    """The job copies what its ranks would leave."""
    ready = RunDirectory(tmp_path / "ready")
    (ready.path / "failures").mkdir(parents=True)
    ready.metrics.write_text("".join(record(step, loss=9.0 - step) + "\n" for step in range(1, 6)))
    said(ready, 3, "peer", 1.0)
    said(ready, 1, "error", 2.0)
    cluster.runs(f"cp -r {ready.path}/{left} {the_run(job).path}" if left else ":")
    cluster.is_state(state)
    found, out, err = cluster.launch(mark, job, "--on", "slurm", "--wait", "--json")
    document = json.loads(out)
    assert found == code and figures.items() <= document.items() and words in err
    assert left != "failures" or document["cause"]["rank"] == 1


def test_an_interrupt_ends_the_waiting_not_the_job(cluster: Cluster, job: Path, mark: str) -> None:
    program = cluster.start(mark, job, "--on", "slurm", "--wait", "--json")
    until((cluster.folder / "looked").exists)
    code, out, err = program.outcome(signal.SIGINT)
    assert code == 0 and json.loads(out)["state"] == "submitted"
    assert "job 4242 goes on, `hpc-mp cancel" in err


@pytest.mark.parametrize(("line", "code", "state", "words", "saved"), table(__file__, "launch_slurm.toml", "steps"))
def test_a_step(cluster: Cluster, job: Path, mark: str, line: str, code: int, state: str, words: str, saved: list[int]) -> None:
    """Ranks that end with exit code 0 have completed the run if its last step is saved."""
    ready = make_run(load_job(job), *saved, name="ready")
    cluster.runs(f"cp -r {ready.checkpoints} {the_run(job).path}; {line}")
    found, out, err = cluster.launch(mark, job, "--json", **STEP)
    document = json.loads(out)
    assert (found, document["state"], document["job_id"]) == (code, state, "7") and words in err
    assert "in this allocation (inside the live allocation 7)" in err
    assert not (cluster.folder / "submitted").exists()


@pytest.mark.parametrize(("answer", "signals", "words"), [
    ("exit 75", (signal.SIGTERM,), "saving at the next step"), ("", (signal.SIGTERM, signal.SIGINT), "killed")])
def test_an_interrupted_step_saves_and_the_second_interrupt_kills(cluster: Cluster, job: Path, mark: str, answer: str,
                                                                  signals: tuple[signal.Signals, ...], words: str) -> None:
    ready = cluster.folder / "ready"
    cluster.runs(f"trap '{answer}' USR2; touch {ready}; while :; do sleep 0.1; done")
    program = cluster.start(mark, job, "--json", **STEP)
    until(ready.exists)
    code, out, err = program.outcome(*signals)
    assert code == 1 and json.loads(out)["state"] == "stopped" and words in err
