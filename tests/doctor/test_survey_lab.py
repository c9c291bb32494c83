"""From a real measurement on shaped links to a job that leaves the bad node out, as an ordinary user of a real Slurm."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_jobs import TWO, hpc_mp, launch, launch_command, own_ledger, write_job
from slurm_lab import faults
from slurm_lab.cluster import Cluster
from slurm_lab.lab import USER
from survey_plants import BASE

from hpc_mp.cluster.bandwidth import read_measured, where
from hpc_mp.rundir import RunDirectory, read_lines


@pytest.fixture
def job(lab: Cluster) -> Iterator[Path]:
    """A job file on the file system that all nodes share, and links of the same rate."""
    directory = lab.share / f"survey {os.urandom(2).hex()}"
    lab.shape(BASE)
    yield write_job(directory)
    lab.mend()
    shutil.rmtree(directory, ignore_errors=True)


def blame_n1(lab: Cluster, job: Path) -> None:
    """An ordinary user surveys the lab while n1 has a slow link."""
    page = job.parent / "doctor.html"
    with faults.slow_node(lab, "n1", "80mbit", BASE):
        done = lab.run(hpc_mp("doctor", "--nodelist", "n[1-4]", "--json", "--html", page), user=USER, cwd=job.parent, timeout=180,
                       environ=own_ledger(job))
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    (found,) = document["diagnoses"]
    assert (found["code"], found["members"], found["certain"]) == ("node-slow", ["n1"], True)
    assert document["leaves"] == {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2"} and document["complete"]
    assert "excludes n1 for a day" in done.stderr and "node-slow" in page.read_text()
    rates = read_measured(where(document["cluster"], own_ledger(job)))
    assert rates is not None and len(rates.pairs) == 6
    assert 0.25 < (rates.between("n1", "n2") or 0) / (rates.between("n2", "n3") or 1) < 0.6, "0.4 where nothing else runs"


def test_a_node_that_was_measured_to_be_slow_is_left_out_of_the_next_job(lab: Cluster, job: Path) -> None:
    blame_n1(lab, job)
    planned = lab.run(launch_command(job, TWO, "--dry-run"), user=USER, cwd=job.parent, timeout=60, environ=own_ledger(job))
    assert planned.returncode == 0 and "avoided: n1 (node-slow: " in planned.stderr, planned.stderr
    assert "#SBATCH --exclude=n1\n" in json.loads(planned.stdout)["script"]


@pytest.mark.prove
def test_the_job_itself_runs_on_other_nodes(lab: Cluster, job: Path) -> None:
    blame_n1(lab, job)
    ended = launch(lab, job, TWO, user=USER)
    hosts = {line["host"] for line in read_lines(RunDirectory(Path(ended["run"])).ranks)}
    assert ended["state"] == "completed" and len(hosts) == 2 and "n1" not in hosts


@pytest.mark.prove
def test_survey_then_launch_in_one_command(lab: Cluster, job: Path) -> None:
    words = ["doctor", "--nodelist", "n[1-4]", "--then-launch", job]
    job.write_text(job.read_text().replace("[job]\n", "[job]\nnodes = 2\nranks_per_node = 1\n", 1))
    with faults.slow_node(lab, "n1", "80mbit", BASE):
        done = lab.run(hpc_mp(*words), user=USER, cwd=job.parent, timeout=180, environ=own_ledger(job))
    assert done.returncode == 0 and "avoided: n1 (node-slow" in done.stdout, done.stdout + done.stderr
    assert "#SBATCH --exclude=n1\n" in next(job.parent.glob("runs/*/0001/job.sbatch")).read_text()
