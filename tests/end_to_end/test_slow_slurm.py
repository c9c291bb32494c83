"""A Slurm that notices a dead node late, as on real sites: 300 s by default, 5 s in the lab of the other tests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest
from slurm_jobs import until
from slurm_lab.lab import Lab
from test_examples import LAUNCH, assert_same, copy, newest, own, undisturbed

from hpc_mp.rundir import RunDirectory, history, read_json
from hpc_mp.rundir.outcome import verdict
from hpc_mp.rundir.records import AWAITING

__all__ = ["undisturbed"]  # the fixture

OPTIONS = ("--on", "slurm", "--set", "environment.health=false", "--set", 'environment.set={ GLOO_SOCKET_IFNAME = "eth0" }',
           "--set", "program.silent_limit=3600")  # silence is no sign of it


def awaits(run: RunDirectory) -> bool:
    return read_json(run.status)["phase"] == AWAITING


def hpc_mp(lab: Lab, *words: str) -> str:
    done = lab.run([sys.executable, "-m", "hpc_mp", *words], environ=own(lab.share), timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stays_dead(lab: Lab, run: RunDirectory, dead: str) -> None:
    """Queued again at once, the job would never start."""
    until(lambda: awaits(run), "the wait for Slurm", 200)
    assert f"waiting for Slurm until it notices that {dead} is dead" in hpc_mp(lab, "status", str(run.path))


def comes_back(lab: Lab, run: RunDirectory, dead: str) -> None:
    """Before Slurm has noticed: nobody tells srun that the node's tasks are gone."""
    time.sleep(20)
    lab.boot(dead)


def is_cancelled(lab: Lab, run: RunDirectory, dead: str) -> None:
    until(lambda: awaits(run), "the wait for Slurm", 200)
    hpc_mp(lab, "cancel", str(run.path))


# (what happens once the second node is dead, the kind of the first attempt's end, how the run ends, after so many attempts)
ENDS: dict[str, tuple[Callable[[Lab, RunDirectory, str], None], str, str, int]] = {
    "the node stays dead": (stays_dead, "node", "completed", 2),
    "the node comes back": (comes_back, "lost", "completed", 2),
    "the run is cancelled": (is_cancelled, "node", "stopped", 1),
}


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ENDS)
def test_a_node_is_dead_long_before_slurm_notices(name: str, undisturbed: RunDirectory) -> None:
    happens, kind, state, attempts = ENDS[name]
    with Lab(overrides={"SlurmdTimeout": "150", "KillWait": "2", "MessageTimeout": "10", "ReturnToService": "1"}) as lab:
        example = copy("torch-ddp", lab.share, 0.3)
        launched = lab.run([*LAUNCH, *OPTIONS], cwd=example, timeout=120, environ=own(lab.share))
        assert launched.returncode == 0, launched.stderr
        run = newest(example)
        until(lambda: (run.path / "model.pt").exists(), "a checkpoint", 200)
        dead = read_json(run.attempt_record)["hosts"][1]
        lab.kill(dead)
        happens(lab, run, dead)
        until(lambda: verdict(run) is not None, "the end", 500)
        said = run.main_log.read_text() + run.path.joinpath("history.jsonl").read_text()
        assert verdict(run).state == state and run.attempt() == attempts, said  # type: ignore[union-attr]
        first = history.history(run)[0]
        assert first.kind == kind and first.nodes == (dead,), said
        if state == "completed":
            assert dead not in read_json(run.attempt_record)["hosts"], said
            assert_same(undisturbed, run)
