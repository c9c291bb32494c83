"""Nodes that are lost in turn and come back: the job starts again whenever enough are up, though nobody looks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_jobs import command, light, own_ledger, steps, submit, until, write_job
from slurm_lab.cluster import Cluster

from hpc_mp.cluster.bad_nodes import BadNode, ledger, record
from hpc_mp.cluster.exclusions import read_exclusions
from hpc_mp.rundir import RunDirectory, read_json, read_lines

pytestmark = [pytest.mark.timeout(1200), pytest.mark.prove]

THREE = ("job.nodes=3", "job.ranks_per_node=1", "train.global_batch=24", "train.steps=20000", "checkpoint.every=100",
         "job.heartbeat_timeout=10", "slurm.retries=3")
HELD_S = 130  # how long Slurm holds a job back that was queued again, and a little
SOON_S = 60


@pytest.fixture
def job(lab: Cluster) -> Iterator[Path]:
    directory = lab.share / f"excluded {time.time_ns() % 10**6}"
    yield write_job(directory)
    for run in directory.glob("runs/*/[0-9]*"):
        lab.run(["scancel", *(name.read_text().strip() for name in (run / "job.id", run / "watch.id") if name.exists())])
        print(*(f"{name}: {name.read_text()}" for name in (run / "watch.log", *run.glob("slurm-*.log")) if name.exists()))
    lab.mend()
    shutil.rmtree(directory, ignore_errors=True)


def field(lab: Cluster, job_id: str, name: str) -> str:
    said = lab.run(["scontrol", "show", "job", "--oneliner", job_id]).stdout
    return next(word.partition("=")[2] for word in said.split() if word.startswith(f"{name}="))


def bad_nodes_of(lab: Cluster, job: Path) -> Path:
    return ledger(f"lab{lab.number}", own_ledger(job))


def trains_again(run: RunDirectory, attempt: int) -> bool:
    return any(line["attempt"] > attempt for line in read_lines(run.metrics)[-3:])


def attempt(run: RunDirectory) -> int:
    return int(read_json(run.attempt_record)["attempt"])


def test_a_second_node_is_lost_when_the_first_is_back_and_the_job_waits(lab: Cluster, job: Path) -> None:
    run, job_id = submit(lab, job, THREE)
    until(lambda: steps(run) >= 12, "some steps")
    _, second, third = read_json(run.attempt_record)["hosts"]
    lab.kill(second)
    until(lambda: read_exclusions(run.excluded) and field(lab, job_id, "JobState") == "PENDING", "the job queued again")
    time.sleep(10)
    lab.boot(second)
    lab.kill(third)
    took = until(lambda: trains_again(run, 1), "a step of the next start", HELD_S + SOON_S)
    print(f"steps again after {took:.0f} s")
    assert second in read_json(run.attempt_record)["hosts"] and third not in read_json(run.attempt_record)["hosts"]

    # And in turn: the other comes back, and the job's first node dies, with all that we have running.
    now, first = attempt(run), read_json(run.attempt_record)["hosts"][0]
    lab.boot(third)
    lab.kill(first)
    took = until(lambda: trains_again(run, now), "a step after the first node's death", HELD_S + SOON_S)
    print(f"and after {took:.0f} s")
    assert first not in read_json(run.attempt_record)["hosts"]


def test_the_first_node_dies_while_a_node_of_the_ledger_is_left_out(lab: Cluster, job: Path) -> None:
    """No process of the run is left then, and what remains is one node too few."""
    record(bad_nodes_of(lab, job), [BadNode("n3", "lost", "n3 vanished", "run", time.time(), time.time() + 3600)])
    run, job_id = submit(lab, job, ("job.nodes=3", "job.ranks_per_node=1", "train.global_batch=24", light(job, "sleep 600")))
    until(lambda: run.attempt_record.exists() and run.watch_id.exists(), "the start")
    assert read_json(run.attempt_record)["hosts"] == ["n1", "n2", "n4"] and field(lab, job_id, "ExcNodeList") == "n3"
    shown = command(lab, "status", run.path).stdout
    assert "n3, excluded by hpc-mp since" in next(line for line in shown.splitlines() if line.startswith("without")), shown
    time.sleep(5)
    lab.kill("n1")
    took = until(lambda: attempt(run) > 1, "the next start", HELD_S + SOON_S)
    print(f"started again after {took:.0f} s")
    assert read_json(run.attempt_record)["hosts"] == ["n2", "n3", "n4"] and not read_exclusions(run.excluded)


def test_an_exclusion_by_the_user_stays_beside_ours(lab: Cluster, job: Path) -> None:
    """Three nodes are needed, the user excludes n1, n3 is in the ledger: it is taken, and n1 is not."""
    lab.kill("n2")
    until(lambda: lab.idle() == 3, "a node down", 60)
    record(bad_nodes_of(lab, job), [BadNode("n3", "lost", "n3 vanished", "run", time.time(), time.time() + 3600)])
    run, job_id = submit(lab, job, ("job.nodes=2", "job.ranks_per_node=1", 'slurm.extra.exclude="n1"', light(job, "sleep 300")))
    assert field(lab, job_id, "ExcNodeList") == "n[1,3]" and field(lab, job_id, "JobState") == "PENDING"
    took = until(lambda: run.attempt_record.exists(), "the start", SOON_S)
    print(f"started after {took:.0f} s")
    assert read_json(run.attempt_record)["hosts"] == ["n3", "n4"] and field(lab, job_id, "ExcNodeList") == "n1"
