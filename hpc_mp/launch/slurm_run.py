"""Run a plan on Slurm: as a job, or as a step of the allocation we are in."""

from __future__ import annotations

import selectors
import signal
import subprocess
import time
from collections.abc import Callable

from hpc_mp.errors import RunFailed
from hpc_mp.launch.compose import Plan
from hpc_mp.launch.endings import ending
from hpc_mp.launch.interrupts import Interrupts
from hpc_mp.launch.outcome import STOPPED, Cause, Outcome, State, figures, first, reported
from hpc_mp.launch.progress import Progress, progress_for
from hpc_mp.launch.resume import JOB_ID, Resumed
from hpc_mp.launch.slurm import FORGOTTEN, step_command, step_environment, submit, wait
from hpc_mp.launch.tail import Attempt
from hpc_mp.launch.write import begin
from hpc_mp.rundir import write_text

LOOK = 1.0  # seconds between two looks at a step of ours
STOPPING = frozenset({"CANCELLED", "PREEMPTED", "TIMEOUT", "DEADLINE"})  # ends that Slurm or its user chose
# An interrupt during a step: the signal to srun, and what it does there (see slurm.step_command).
ON_INTERRUPT = (
    (signal.SIGUSR2, "saving at the next step, then stopping; once more (Ctrl-C or SIGTERM) kills"),
    (signal.SIGTERM, "killed: steps since the last checkpoint are lost"),
)


def launch_job(plan: Plan, resumed: Resumed | None, follow: bool, say: Callable[[str], None]) -> Outcome:
    """Submit the script. ``follow``: wait for the job's end; Ctrl-C then ends the waiting, not the job.

    Raises:
        HpcMpError: the run directory cannot be written.
    """
    with begin(plan, resumed) as (run, number, _):
        attempt = Attempt(run, number)
        try:
            job_id = submit(run.script)
        except RunFailed as refused:
            return Outcome(run.path, "failed", cause=Cause("launcher", str(refused)), **figures(attempt))
        write_text(run.path / JOB_ID, f"{job_id}\n")
    say(f"run       {run.path}\njob       {job_id}")
    if not follow:
        return Outcome(run.path, "submitted", job_id)
    try:
        with progress_for(plan.spec.train.steps) as progress:
            end = wait(job_id, lambda state, seconds: _show(state, seconds, attempt, progress))
    except KeyboardInterrupt:
        say(f"no longer waiting: job {job_id} goes on, scancel {job_id} ends it")
        return Outcome(run.path, "submitted", job_id, **figures(attempt))
    numbers = figures(attempt)
    done = end == "COMPLETED" or (end == FORGOTTEN and numbers["steps"] == plan.spec.train.steps)
    stopped = end in STOPPING or (attempt.status() or {}).get("phase") == "stopped"
    state, cause = _judge(attempt, "completed" if done else "stopped" if stopped else "failed",
                          f"Slurm job {job_id} ended as {end}; its log is {run.log / f'slurm-{job_id}.log'}")
    return Outcome(run.path, state, job_id, cause=cause, **numbers)


def launch_step(plan: Plan, resumed: Resumed | None, job_id: str, say: Callable[[str], None]) -> Outcome:
    """Run the script as a step of the allocation ``job_id``, to its end. Raises HpcMpError as ``launch_job`` does."""
    with begin(plan, resumed) as (run, number, lock):
        say(f"run       {run.path}")
        attempt = Attempt(run, number)
        log = run.log / f"slurm-{job_id}.log"
        with (open(log, "ab") as output, Interrupts() as interrupts,
              progress_for(plan.spec.train.steps) as progress):
            step = subprocess.Popen(step_command(run.script), env=step_environment(), stdin=subprocess.DEVNULL,
                                    stdout=output, stderr=output, start_new_session=True, pass_fds=[lock])
            code = _follow(step, attempt, interrupts, progress)
    says: State = "completed" if code == 0 else "stopped" if code == STOPPED else "failed"
    state, cause = _judge(attempt, says, f"srun {ending(code)}; its log is {log}")
    return Outcome(run.path, state, job_id, cause=cause, **figures(attempt))


def _show(state: str, seconds: float, attempt: Attempt, progress: Progress) -> None:
    """Show progress for so many seconds."""
    waiting = {"phase": state.lower(), "detail": "", "done": 0, "total": 0}
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        progress.update(attempt.status() or waiting, attempt.steps())
        time.sleep(min(left, progress.interval or left))


def _follow(step: subprocess.Popen[bytes], attempt: Attempt, interrupts: Interrupts, progress: Progress) -> int:
    """Show progress and pass interrupts on until the step has ended; its exit code, ``STOPPED`` after interrupts."""
    pressed = 0
    with selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ)
        while (code := step.poll()) is None:
            selector.select(progress.interval or LOOK)
            for _ in range(interrupts.received()):
                number, meaning = ON_INTERRUPT[min(pressed, 1)]
                pressed += 1
                progress.note(meaning)
                step.send_signal(number)
            progress.update(attempt.status(), attempt.steps())
    return STOPPED if pressed and code else code


def _judge(attempt: Attempt, state: State, said: str) -> tuple[State, Cause | None]:
    """``state``, with the ranks' own words for a failure, or else what was ``said`` of it."""
    if state != "failed":
        return state, None
    said_by_ranks = first(reported(failure, attempt) for failure in attempt.failures().values())
    return state, said_by_ranks or Cause("launcher", said)
