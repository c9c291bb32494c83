"""Every example but torch-ddp, which has tests of its own, on a real Slurm: by an ordinary user, and with a host that dies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_programs import EXAMPLES, LAUNCH, PATH, Example, assert_same, copy, installed, local, newest, steps
from slurm_jobs import until
from slurm_lab.lab import Lab

from hpc_mp.rundir import read_json
from hpc_mp.rundir.outcome import verdict


@pytest.fixture
def shared(lab: Lab) -> Iterator[Path]:
    directory = lab.share / f"examples {os.urandom(2).hex()}"
    directory.mkdir()
    directory.chmod(0o777)
    yield directory
    lab.mend()
    shutil.rmtree(directory, ignore_errors=True)


def on_slurm(lab: Lab, name: str) -> Example:
    example = installed(name)
    if example.needs == "mpi4py" and lab.run(["srun", "--mpi=pmix", "--ntasks=1", "true"]).returncode:
        pytest.skip("this Slurm has no PMIx plug-in")
    return example


def launch(lab: Lab, where: Path, *options: str, user: str | None = None) -> str:
    done = lab.run(
        [*LAUNCH, "--on", "slurm", "--set", "environment.health=false",
         "--set", 'environment.set={ GLOO_SOCKET_IFNAME = "eth0" }', *options], user=user, cwd=where, timeout=300,
        environ={"PATH": PATH, "XDG_STATE_HOME": str(where.parent / "state"), "GLOO_SOCKET_IFNAME": "eth0"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_ordinary_user_runs_it_on_two_hosts(lab: Lab, shared: Path, name: str) -> None:
    example, where = on_slurm(lab, name), copy(name, shared)
    said = launch(lab, where, "--wait", user="nobody")
    assert example.summary in said, said
    assert steps(newest(where)) == list(example.steps)


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_node_dies_and_the_job_goes_on_without_it(lab: Lab, shared: Path, name: str) -> None:
    """Its parameters are those of a run on this machine that nothing has disturbed."""
    example, whole = on_slurm(lab, name), copy(name, shared)
    undisturbed = local(whole)
    assert undisturbed.returncode == 0, undisturbed.stderr

    disturbed = copy(name, shared, slow=True)
    launch(lab, disturbed)
    run = newest(disturbed)
    until(lambda: (run.path / example.first).exists() or verdict(run) is not None, "a checkpoint", 240)
    victim = read_json(run.attempt_record)["hosts"][1]
    lab.kill(victim)
    until(lambda: verdict(run) is not None, "the end", 300)
    assert verdict(run).state == "completed" and run.attempt() == 2, run.main_log.read_text()  # type: ignore[union-attr]
    assert victim not in read_json(run.attempt_record)["hosts"]
    assert steps(run)[-1] == example.steps[-1] and steps(run)[0] > example.steps[0]
    assert_same(example, newest(whole), run)
