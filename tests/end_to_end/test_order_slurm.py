"""Measured rates and the order of hosts: from the doctor's file to the ranks of a job on a real Slurm, as an ordinary user."""

import time
from itertools import combinations
from pathlib import Path

import pytest
from slurm_jobs import close, emulated, launch, light, losses, own_ledger
from slurm_lab.cluster import Cluster
from slurm_lab.lab import USER

from hpc_mp.cluster.bandwidth import LinkRates, read_measured, where, write_measured
from hpc_mp.rundir import RunDirectory, read_attempt, read_lines

NODES = ("n1", "n2", "n3", "n4")
DPT = ("job.nodes=4", "job.ranks_per_node=1", "parallel.pipeline=2", "parallel.microbatches=3", 'parallel.order="DPT"',
       "train.steps=2")  # nodes are (replica, stage): pp 1–2 3–4, dp 1–3 2–4


def plant(lab: Cluster, job: Path, *slow: str) -> None:
    """What the doctor would have noted of this cluster: one way has 30 % of the others' rate."""
    config = lab.run(["scontrol", "show", "config"], check=True).stdout
    name = next(line.split()[-1] for line in config.splitlines() if line.startswith("ClusterName"))
    pairs = tuple((i, j, 0.3 if {NODES[i], NODES[j]} == {*slow} else 1.0) for i, j in combinations(range(4), 2))
    path = where(name, own_ledger(job))
    write_measured(path, LinkRates(name, time.time() - 3 * 86400, NODES, pairs))
    for folder in (path.parent.parent, path.parent):
        folder.chmod(0o777)
    path.chmod(0o644)


def ran(lab: Cluster, job: Path, *more: str, user: str | None = USER) -> tuple[tuple[str, ...], str, RunDirectory]:
    """The host of every node of the placement, what main.log says of the order, and the run."""
    run = RunDirectory(Path(launch(lab, job, (*DPT, *more), user=user)["run"]))
    said = next(line for line in run.main_log.read_text().splitlines() if "rank map:" in line)
    return read_attempt(run.attempt_record).hosts, said, run


def corners(hosts: tuple[str, ...], *slow: str) -> bool:
    """Whether two hosts stand at nodes that say nothing to each other."""
    return {hosts.index(host) for host in slow} in ({0, 3}, {1, 2})


def test_a_slow_way_carries_nothing_and_no_number_changes(lab: Cluster, job: Path) -> None:
    usual, said, run = ran(lab, job, light(job, steps=2), "job.directory=usual", user=None)
    assert "of the busiest leaf switch" in said and "rates" not in said and not run.measured.exists()
    slow = usual[0], usual[2]  # two replicas of a stage
    plant(lab, job, *slow)
    moved, said, run = ran(lab, job)
    assert moved == tuple(host for _, host in sorted((line["rank"], line["host"]) for line in read_lines(run.ranks)))
    assert corners(moved, *slow) and not corners(usual, *slow)
    assert f"{'–'.join(sorted(slow))} has 30 % of the usual rate: carries nothing" in said and "measured 3 d ago" in said
    kept = read_measured(run.measured)
    assert kept is not None and kept.between(*slow) == 0.3 and run.measured.stat().st_mode & 0o077 == 0
    assert close(losses(run.path), emulated(job, DPT))


@pytest.mark.prove
def test_a_slow_way_that_nothing_takes_changes_nothing(lab: Cluster, job: Path) -> None:
    """Negative control: the hosts stand as the switches have them."""
    usual, _, before = ran(lab, job)
    plant(lab, job, usual[0], usual[3])
    hosts, said, run = ran(lab, job)
    assert (hosts, losses(run.path)) == (usual, losses(before.path)) and "30 % of the usual rate: carries nothing" in said
