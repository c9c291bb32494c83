"""Which run ``--resume`` goes on with, whether the job may do so, and the lock that lets only one launch have a run."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_mp.base.command import Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.job import FINAL, UNKNOWN
from hpc_mp.cluster.slurm.jobs import job_states
from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.resolution import ResolvedKey
from hpc_mp.rundir import RunDirectory, find_run
from hpc_mp.rundir.checkpoints import complete_steps, step_of
from hpc_mp.rundir.history import complete, saved_step
from hpc_mp.rundir.records import StepMetrics, read_records
from hpc_mp.rundir.runs import successors

# What makes the sequence of losses; all else (layout, nodes, more steps, learning rate …) may change.
FIXED = ("model.", "data.", "train.seed", "train.global_batch",
         "train.optimizer", "train.betas", "train.eps", "train.momentum")
FREE = ("model.stage", "data.stage")  # of these tables, where files are read from


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run that is held and may be gone on with: its open lock file, and whether any steps, or the last
    evaluation, are left to do."""

    run: RunDirectory
    lock: int
    left: bool


@contextmanager
def resuming(spec: JobSpec, ask: Runner = ask) -> Iterator[Resumed]:
    """The newest run of this job's name, held.

    Raises:
        HpcMpError: there is none, it still goes on, a key that must not change did, or ``train.steps`` is less than
            what has been done.
    """
    base = Path(spec.job.directory) / spec.job.name
    try:
        run = find_run(base)
    except HpcMpError:
        raise HpcMpError(f"--resume of job {spec.job.name!r}", f"there is no run in {base}",
                         "launch it without --resume, or mend job.name and job.directory") from None
    with hold(run) as lock:
        _check_not_queued(run, ask)
        _check_fixed(run, spec)
        yield Resumed(run, lock, _steps_left(run, spec))


def rate_schedule(spec: JobSpec, run: RunDirectory | None) -> ResolvedKey[str]:
    """``train.lr_schedule``, with a reason where more or fewer steps than before make the rate of a run jump.

    Args:
        run: that is gone on with; None for a new one.
    """
    chosen: ResolvedKey[str] = ResolvedKey("train.lr_schedule", spec.train.lr_schedule)
    if run is None or chosen.value == "constant":
        return chosen
    before, done = load_job(run.job).train, saved_step(run)
    last = next((step for step in read_records(run.metrics, StepMetrics) if step.step == done), None)
    if before.steps == spec.train.steps or last is None or done <= spec.train.warmup_steps:
        return chosen
    jumps = "rises" if spec.train.steps > before.steps else "drops"
    return replace(chosen, why=f"the {chosen.value} fall of the learning rate ends at train.steps = {spec.train.steps}, and no "
                               f"longer at {before.steps}: the rate {jumps} at once, from {last.learning_rate:g} in step {done}")


@contextmanager
def hold(run: RunDirectory) -> Iterator[int]:
    """Have the run alone; gives the open lock file, which all emulated ranks inherit: while one lives, it is held.

    Raises:
        HpcMpError: another launch has it, or ranks of one still live.
    """
    lock = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HpcMpError(f"run {run.path}", "is still going on, or another launch resumes it",
                             "wait for its end, or stop it with Ctrl-C where it was launched") from None
        except OSError as error:  # Lustre, for one, may be mounted without locks
            warnings.warn(f"no lock on {run.path} ({error.strerror}): do not resume it twice at once", stacklevel=3)
        yield lock
    finally:
        os.close(lock)


def _check_not_queued(run: RunDirectory, ask: Runner) -> None:
    try:
        job_id = (run.job_id).read_text().strip()
    except FileNotFoundError:
        return
    for each, job in job_states([job_id, *successors(run, job_id)], ask).items():
        if job.state not in FINAL | {UNKNOWN}:
            raise HpcMpError(f"run {run.path}", f"is Slurm job {each}, which is {job.state}",
                             f"wait for its end, or end it with `hpc-mp cancel {run.path}`")


def _check_fixed(run: RunDirectory, spec: JobSpec) -> None:
    old, new = (_leaves("", job.model_dump()) for job in (load_job(run.job), spec))
    for key in sorted(old.keys() | new.keys()):
        if key.startswith(FIXED) and key not in FREE and old.get(key) != new.get(key):
            raise HpcMpError(f"{key} = {new.get(key)}", f"was {old.get(key)} when {run.path} was launched",
                             "put the old value back, or launch a new run without --resume")


def _steps_left(run: RunDirectory, spec: JobSpec) -> bool:
    saved = complete_steps(run.checkpoints)
    done = step_of(saved[-1]) if saved else 0
    if spec.train.steps < done:
        raise HpcMpError(f"train.steps = {spec.train.steps}", f"is less than the {done} steps that {run.path} has done",
                         f"set train.steps to more than {done} to train on")
    return not complete(run, spec)


def _leaves(name: str, value: Any) -> dict[str, Any]:
    """The leaves of a tree under their dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    below = (_leaves(f"{name}.{key}" if name else key, inner) for key, inner in value.items())
    return {leaf: found for leaves in below for leaf, found in leaves.items()}
