"""Resuming: the run that ``--resume`` selects, the check of the job, and the lock that lets only one launch have a run."""

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_mp.base.command import Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.jobs import COMPLETING, FINAL, UNKNOWN
from hpc_mp.job import AnySpec, JobSpec, ProgramSpec, load_job, load_resolved
from hpc_mp.job.learning_rate import ScheduleOptions
from hpc_mp.job.resolution import ResolvedKey
from hpc_mp.job.values import leaves, toml_value
from hpc_mp.layout.learning_rate import leap, learning_rate
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.checkpoints import complete_steps, step_of
from hpc_mp.rundir.history import complete, saved_step
from hpc_mp.rundir.outcome import verdict
from hpc_mp.rundir.records import StepMetrics, read_records
from hpc_mp.runs.lock import hold
from hpc_mp.runs.status import described

# Keys that determine the sequence of losses; all else (layout, nodes, more steps, learning rate …) may change.
FIXED = ("model.", "data.", "lora.", "train.seed", "train.global_batch", "train.optimizer", "train.betas", "train.eps",
         "train.momentum", "train.muon_momentum")
OF_STATE = ("model.", "lora.", "train.optimizer")  # among these, keys that make a checkpoint unusable for another run too
FREE = ("model.stage", "data.stage", "lora.dropout")  # in these tables: locations that files are read from, and as train.dropout
RATE_KEYS = {"steps", "learning_rate", "lr_schedule", "lr_schedule_options", "warmup_steps"}
ENDING_S = 30.0  # time for an ending job before a resume is refused
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Resumed:
    """A held run that may be resumed: its open lock file, and whether steps or the last evaluation are left to do."""

    run: RunDirectory
    lock: int
    left: bool


@contextmanager
def resuming(spec: AnySpec, run: RunDirectory | None, ask: Runner = ask) -> Iterator[Resumed]:
    """Hold and yield the run that the job resumes. Raises HpcMpError if no run exists, it is still running, a key that must not
    change did, or ``train.steps`` is less than the steps done."""
    if run is None:
        raise HpcMpError(f"--resume of job {spec.job.name!r}", f"there is no run in {Path(spec.job.directory) / spec.job.name}",
                         "launch it without --resume, or mend job.name and job.directory")
    with hold(run) as lock:
        _check_not_queued(run, ask)
        _check_fixed(run, spec)
        yield Resumed(run, lock, _steps_left(run, spec))


def rate_schedule(spec: JobSpec, run: RunDirectory | None) -> ResolvedKey[str]:
    """Return ``train.lr_schedule``, with a reason if the learning rate of a resumed run jumps, and how to avoid that. ``run``:
    the resumed run; None for a new one."""
    chosen: ResolvedKey[str] = ResolvedKey("train.lr_schedule", spec.train.lr_schedule)
    last_step = 0 if run is None else saved_step(run)
    if run is None or not 0 < last_step < spec.train.steps:
        return chosen
    old_train = load_job(run.job).train
    trained = {record.step: record.learning_rate for record in read_records(run.metrics, StepMetrics)}
    # The job file may be that of a resume that trained nothing: the recorded rate, if any, precedes the computed one.
    last_rate = trained.get(last_step) or learning_rate(last_step - 1, old_train)
    if (next_rate := leap(last_step, last_rate, old_train, spec.train)) is None:
        return chosen
    old, new = (leaves("", train.model_dump(include=RATE_KEYS, exclude_none=True)) for train in (old_train, spec.train))
    changed = [f"train.{key} = {new.get(key)} (was {old.get(key)})" for key in {**new, **old} if old.get(key) != new.get(key)]
    no_options = [("lr_schedule_options", "{}")] if spec.train.lr_schedule_options != ScheduleOptions() else []
    steady = shlex.join([f"--set=train.{key}={value}" for key, value in (
        ("lr_schedule", "constant"), *no_options, ("warmup_steps", 0), ("learning_rate", f"{last_rate:.4g}"))])
    return replace(chosen, why=f"the learning rate jumps from {last_rate:.3g} in step {last_step:,} to {next_rate:.3g} in step "
                               f"{last_step + 1:,}, for {', '.join(changed)}; {steady} goes on as it ended")


def _check_not_queued(run: RunDirectory, ask: Runner, patience: float = ENDING_S) -> None:
    """Check that no job of the run is active. Wait for an ending job, which takes Slurm some seconds after the ranks."""
    deadline = time.monotonic() + patience
    while live := [job for job in described([run], ask)[0] if job.state not in FINAL | {UNKNOWN}]:
        ending = all(job.state == COMPLETING for job in live) or (verdict(run) is not None and not any(job.waits for job in live))
        if not ending or time.monotonic() >= deadline:
            raise HpcMpError(f"run {run.path}", f"is Slurm job {live[0].id}, which is {live[0].state}",
                             f"wait for its end, or end it with `hpc-mp cancel {run.path}`")
        time.sleep(POLL_S)


def _check_fixed(run: RunDirectory, spec: AnySpec) -> None:
    old, new = (leaves("", job.model_dump()) for job in (_as_launched(run, spec), spec))
    for key in sorted(old.keys() | new.keys()):
        if key.startswith(FIXED) and key not in FREE and old.get(key) != new.get(key):
            state = f" that begins with its state: checkpoint.resume = {toml_value(str(run.path))}" \
                if saved_step(run) and not key.startswith(OF_STATE) else ""
            raise HpcMpError(f"{key} = {_shown(new.get(key))}", f"was {_shown(old.get(key))} when {run.path} was launched",
                             f"put the old value back, or launch a new run without --resume{state}")


def _as_launched(run: RunDirectory, spec: AnySpec) -> AnySpec:
    """Return the run's own job. Raises HpcMpError if only one of the two jobs is a program's."""
    launched = load_resolved(run.job)
    if type(launched) is not type(spec):
        raise HpcMpError(f"--resume of {run.path}", f"was launched {'with' if isinstance(launched, ProgramSpec) else 'without'} "
                         "[program]", "launch a new run without --resume, or give it another job.name")
    return launched


def _shown(value: object) -> str:
    return "left out" if value is None else toml_value(value)


def _steps_left(run: RunDirectory, spec: AnySpec) -> bool:
    if isinstance(spec, ProgramSpec):  # another command may have more to do
        ended = verdict(run)
        return ended is None or ended.state != "completed" or load_resolved(run.job) != spec
    saved = complete_steps(run.checkpoints)
    last_step = step_of(saved[-1]) if saved else 0
    if spec.train.steps < last_step:
        raise HpcMpError(f"train.steps = {spec.train.steps}", f"is less than the {last_step} steps that {run.path} has done",
                         f"set train.steps to more than {last_step} to train on")
    return not complete(run, spec)
