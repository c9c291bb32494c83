"""``environment.profile`` on a real Slurm: what only a node can tell reaches the ranks, or is left out with the reason."""

from pathlib import Path

import pytest
from slurm_jobs import launch, light, write_job
from slurm_lab.cluster import Cluster

from hpc_mp.rundir import RunDirectory

TELLS = "env | grep -E '^(NCCL|GLOO)_' | sed 's/^/env /'"  # all that a rank does
NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@pytest.fixture
def job(here: Path) -> Path:
    """Return a job file that asks for the profile whose values are found on the node."""
    return write_job(here, 'profile = "ethernet"\nhealth = false\n')


def ran(lab: Cluster, job: Path, *overrides: str) -> tuple[set[str], list[str], str]:
    """What the ranks of both nodes were told, the lines of the profile's log, and the main log."""
    two = ("job.nodes=2", "job.ranks_per_node=1", "train.global_batch=2", light(job, TELLS))
    run = RunDirectory(Path(launch(lab, job, (*two, *overrides))["run"]))
    told = [{line.partition("env ")[2] for line in path.read_text().splitlines() if "env " in line}
            for path in run.node_log.found()]
    assert len(told) == 2 and told[0] == told[1], "every rank gets the same"
    return told[0], run.profile_log.read_text().splitlines(), run.main_log.read_text()


def routed(lab: Cluster, verb: str) -> None:
    """Give node n1 a default route over its first interface, or take it."""
    interface = lab.at("n1", ["sh", "-c", "ip -o -4 addr show scope global | head -1 | cut -d' ' -f2"]).stdout.strip()
    done = lab.at("n1", ["ip", "route", verb, "default", "dev", interface.partition("@")[0]])
    assert done.returncode == 0, done.stderr


def test_a_condition_that_holds_on_the_node_reaches_the_ranks_and_one_that_does_not_is_said(lab: Cluster, job: Path) -> None:
    told, log, _ = ran(lab, job)
    assert not [word for word in told if word.startswith(NAMES)], "n1 has no default route: nothing to set"
    assert [line for line in log if line.startswith("left out  NCCL_SOCKET_IFNAME") and "has no default route" in line]
    routed(lab, "add")
    try:
        told, log, main = ran(lab, job)
        (value,) = (word.partition("=")[2] for word in told if word.startswith("NCCL_SOCKET_IFNAME="))
        assert value.startswith("=") and f"GLOO_SOCKET_IFNAME={value[1:]}" in told
        assert [line for line in log if line.startswith(f"set       NCCL_SOCKET_IFNAME={value}  # ")]
        assert "applied on n1" in log[0]
        assert "profile ethernet: variables 2 set, by the facts of n1; reasons: log/profile.log" in main
        told, log, _ = ran(lab, job, 'environment.set.NCCL_SOCKET_IFNAME="mine"')
        assert "NCCL_SOCKET_IFNAME=mine" in told and f"GLOO_SOCKET_IFNAME={value[1:]}" in told
        assert [line for line in log if line.startswith("kept      NCCL_SOCKET_IFNAME=mine  # environment.set")]
    finally:
        routed(lab, "del")
