"""Training jobs on the lab's Slurm, launched by the real command and compared with one process of plain transformers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import layouts
import warm
from rendering import executable
from slurm_lab.cluster import Cluster

from hpc_mp.job import load_job
from hpc_mp.rundir import Manifest, RunDirectory, read_lines, write_manifest
from hpc_mp.rundir.checkpoints import checkpoint_name

EXACT = 1e-12
EIGHT = ("job.nodes=4", "job.ranks_per_node=2", "parallel.tensor=2", "parallel.pipeline=2", "parallel.microbatches=3",
         "environment.health=true")
TWO = ("job.nodes=2", "job.ranks_per_node=1", "parallel.zero=1")


def write_job(directory: Path, more: str = "health = false\n") -> Path:
    """Write a job file and its text in a directory that every node sees. A health check costs one CPU second per node."""
    path = layouts.write_job(directory, more='[environment]\nset = { OMP_NUM_THREADS = "1" }\n' + more)
    directory.chmod(0o777)  # an ordinary user launches from it too
    return path


def hpc_mp(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "hpc_mp", *map(str, words)]


def launch_command(job: Path, overrides: Sequence[str], *options: str) -> list[str]:
    return hpc_mp("launch", job, "--on", "slurm", "--json", *options,
                  *(word for override in overrides for word in ("--set", override)))


def command(lab: Cluster, *words: str | Path, user: str | None = None, timeout: float = 240,
            environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``hpc-mp WORDS``: for root, warm on this machine; for other users, and always on a newer Slurm, on the submit host."""
    if user is None and getattr(lab, "chroot", None) is None:
        return warm.Program(hpc_mp(*words)[1:], lab.environ | (environ or {})).end(timeout)
    return lab.run(hpc_mp(*words), user=user, timeout=timeout, environ=environ)


def launch(lab: Cluster, job: Path, overrides: Sequence[str], *options: str, user: str | None = None, code: int = 0,
           timeout: float = 240, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """Run ``hpc-mp launch --wait`` to the end of the job, and return its report."""
    words = launch_command(job, overrides, "--wait", *options)[3:]
    done = command(lab, *words, user=user, timeout=timeout, environ=own_ledger(job) | (environ or {}))
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{logs(job)}"
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def submit(lab: Cluster, job: Path, overrides: Sequence[str], user: str | None = None) -> tuple[RunDirectory, str]:
    """Run ``hpc-mp launch`` without waiting, and return the run and its job ID."""
    done = command(lab, *launch_command(job, overrides)[3:], user=user, timeout=120, environ=own_ledger(job))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    return RunDirectory(Path(document["run"])), document["job_id"]


def light(job: Path, does: str = "true", name: str = "rank", steps: int = 0) -> str:
    """Return an override that replaces ranks by a shell command, for tests that need no training: torch is not imported. If the
    command does not exit, the first rank leaves a checkpoint of the last step (``steps``: if another override sets it)."""
    step, saved = steps or load_job(job).train.steps, job.parent / "saved"
    if not (checkpoint := saved / checkpoint_name(step)).exists():
        checkpoint.mkdir(parents=True)
        write_manifest(checkpoint, Manifest(step, {}))
    script = f"#!/bin/sh\n{does}\n[ $SLURM_PROCID != 0 ] || cp -r '{checkpoint}' \"$HPC_MP_RUN/checkpoints\"\n"
    return f"slurm.python={executable(job.parent / name, script)}"


def own_ledger(job: Path) -> dict[str, str]:
    """Return an environment with a separate ledger of bad nodes for each test."""
    state = job.parent / "state"
    state.mkdir(exist_ok=True)
    state.chmod(0o777)
    return {"XDG_STATE_HOME": str(state)}


def logs(job: Path) -> str:
    """Return all logs of the newest run, for a failed assertion."""
    runs = sorted(job.parent.glob("runs/*/[0-9]*"))
    if not runs:
        return "no run"
    files = [*runs[-1].glob("slurm-*.log"), *runs[-1].rglob("log/*.log")]
    return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in files)


def losses(run: str | Path) -> list[float]:
    """Return the loss of every step. Each step must be there once and in order."""
    lines = read_lines(RunDirectory(Path(run)).metrics)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def steps(run: RunDirectory) -> int:
    return len(read_lines(run.metrics))


def until(condition: Callable[[], object], what: str, timeout: float = 120, pause: float = 0.05) -> float:
    """Wait for a condition, and return the seconds that it took. To ask Slurm costs: for a job's end 0.3 s is pause enough."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, f"not within {timeout} s: {what}"
        time.sleep(pause)
    return time.monotonic() - began


@dataclass(frozen=True)
class Emulation:
    """A job by the text of its file: two with the same text have the same losses, whatever their place."""

    text: str
    overrides: tuple[str, ...]
    path: Path = field(compare=False)


def emulated(job: Path, overrides: Sequence[str]) -> list[float]:
    """Return the losses of the same job on emulated nodes, which run it once for all tests of a process."""
    return emulate(Emulation(job.read_text(), tuple(overrides), job))


@cache
def emulate(job: Emulation) -> list[float]:
    overrides = (word for override in job.overrides for word in ("--set", override))
    done = warm.Program(hpc_mp("launch", job.path, "--on", "local", "--json", *overrides)[1:], os.environ).end(240)
    assert done.returncode == 0, done.stderr
    return losses(json.loads(done.stdout)["run"])


def close(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and max(abs(a - b) for a, b in zip(one, other, strict=True)) <= EXACT
