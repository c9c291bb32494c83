"""Before the ranks start every node is looked at: on a broken one the job is refused, with what is wrong."""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines.tree import _commands, broken, tree
from node_scripts import Node
from slurm_jobs import TWO, launch, light, write_job
from slurm_lab.cluster import Cluster

from hpc_mp.doctor import gate
from hpc_mp.doctor.nccl_log.judge import PATIENCE_S
from hpc_mp.doctor.node import diagnose
from hpc_mp.rundir import find_run

KIND = "ndv5"
DOWN = {"/sys/class/infiniband/mlx5_ib3/ports/1/state": "1: DOWN"}
LOGS = Path(__file__).parents[1] / "nccl_logs"
PROBE = "nccl-probe"
SOCKET, HEALTHY = "one-rank-socket", "one-rank-ib"  # what NCCL said: Using network Socket, Using network IB


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def recorded(tmp_path: Path, root: Path, log: str = "", **probe: object) -> dict[str, str]:
    """The variables that have the gate look at that machine, whose NCCL writes this log or does otherwise."""
    commands = tmp_path / "commands.json"
    said = {"out": (LOGS / f"{log}.log").read_text(encoding="utf-8")} if log else probe
    commands.write_text(json.dumps(_commands(KIND) | ({PROBE: said} if said else {})))
    return {"HPC_MP_DOCTOR_ROOT": str(root), "HPC_MP_DOCTOR_COMMANDS": str(commands)}


def test_a_healthy_machine_passes(node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate.main(recorded(tmp_path, tree(KIND).root)) == 0 and capsys.readouterr().out == ""
    assert node.start("--health", sys.executable, **recorded(tmp_path, tree(KIND).root)) == ""


def test_a_broken_machine_refuses_the_job(node: Node, tmp_path: Path) -> None:
    machine = broken(KIND, DOWN)
    said = node.refused("--health", sys.executable, **recorded(tmp_path, machine.root))
    assert "mlx5_ib3" in said and "leave this node out, or set environment.health = false" in said


@pytest.mark.parametrize(("edits", "code"), [
    ({"/proc/self/environ": "SLURM_CPUS_ON_NODE=999\0"}, "cgroup-cpus"),
    ({"/etc/fstab": "server:/x /x nfs defaults 0 0"}, "mount-missing")])
def test_how_the_host_is_set_up_keeps_no_node_out(tmp_path: Path, edits: dict[str, str], code: str,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    machine = broken(KIND, edits)
    assert code in [finding.code for finding in diagnose(machine, [code], 60) if finding.severity == "error"]
    assert gate.main(recorded(tmp_path, machine.root)) == 0 and capsys.readouterr().out == ""


def test_a_machine_whose_nccl_takes_sockets_refuses_the_job(node: Node, tmp_path: Path) -> None:
    assert "Using network Socket" in (LOGS / f"{SOCKET}.log").read_text(encoding="utf-8")
    said = node.refused("--health", sys.executable, **recorded(tmp_path, tree(KIND).root, SOCKET))
    assert "NCCL uses Socket in 1 process; the machine has InfiniBand" in said and "environment.health = false" in said


@pytest.mark.parametrize("probe", [{"log": HEALTHY}, {"out": ""}, {"code": 1, "err": "CUDA error: unknown error"}],
                         ids=["healthy", "silent", "fails"])
def test_a_machine_whose_nccl_is_well_or_says_nothing_passes(node: Node, tmp_path: Path, probe: dict[str, Any]) -> None:
    assert node.start("--health", sys.executable, **recorded(tmp_path, tree(KIND).root, **probe)) == ""


def test_a_broken_machine_is_refused_before_nccl_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NCCL may hang on it: the answer comes without."""
    machine, begin = broken(KIND, DOWN), time.monotonic()
    assert gate.main(recorded(tmp_path, machine.root, hangs=True)) == 1
    assert "mlx5_ib3" in capsys.readouterr().out and time.monotonic() - begin < PATIENCE_S / 2


def test_a_doctor_that_fails_keeps_no_node_out(node: Node, tmp_path: Path) -> None:
    assert node.start("--health", "/nowhere/python") == ""
    assert node.start("--health", sys.executable, HPC_MP_DOCTOR_COMMANDS="/nowhere/commands.json") == ""


@pytest.fixture
def seen(lab: Cluster) -> Iterator[Path]:
    """A directory that all nodes of the lab see."""
    directory = lab.share / f"machine {os.urandom(2).hex()}"
    directory.mkdir()
    yield directory
    lab.mend()
    shutil.rmtree(directory, ignore_errors=True)


def words(job: Path, variables: dict[str, str]) -> tuple[str, ...]:
    """A job of two ranks on two nodes, each of which looks like the recorded machine. That it is looked at is the default.
    The ranks say that they began."""
    setup = json.dumps([f"export {name}={shlex.quote(value)}" for name, value in variables.items()])
    return (*TWO, f"slurm.setup={setup}", light(job, 'touch "$HPC_MP_RUN/began-$SLURM_PROCID"'))


def began(job: Path) -> int:
    return len(list(find_run(job.parent / "runs" / "exact").path.glob("began-*")))


def test_on_slurm_a_job_whose_nccl_would_take_sockets_does_not_start(lab: Cluster, seen: Path) -> None:
    """The machine has InfiniBand, and its NCCL said ``Using network Socket``."""
    shutil.copytree(tree(KIND).root, seen / "root", symlinks=True)
    job = write_job(seen / "job", more="")
    wanted = words(job, recorded(seen, seen / "root", SOCKET))
    refused = launch(lab, job, wanted, code=2)
    message = refused["cause"]["message"]
    assert refused["state"] == "failed" and "NCCL uses Socket" in message and "environment.health = false" in message, refused
    assert not began(job)
    launch(lab, job, (*wanted, "environment.health=false"))
    assert began(job) == 2
    recorded(seen, seen / "root", HEALTHY)
    launch(lab, job, wanted)
    assert began(job) == 2
