"""Run a plan on Slurm: as a job, or as a step of the allocation we are in."""

from __future__ import annotations

import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc_mp.base.errors import RunFailed
from hpc_mp.base.exit_codes import ending
from hpc_mp.cluster.slurm.job import STOPPING, SlurmJob
from hpc_mp.cluster.slurm.jobs import wait
from hpc_mp.cluster.slurm.submit import sbatch, step_command, step_environment
from hpc_mp.launch.backends.interrupts import Interrupts
from hpc_mp.launch.backends.progress import Progress, progress_for
from hpc_mp.launch.plan import Plan
from hpc_mp.launch.resume import Resumed
from hpc_mp.launch.run_files import begin, begin_array
from hpc_mp.launch.staging.stage_in import stage_environment
from hpc_mp.report import conclude
from hpc_mp.rundir import RunDirectory, write_text
from hpc_mp.rundir.follow import AttemptReader
from hpc_mp.rundir.job_chain import record_successors
from hpc_mp.rundir.outcome import STOPPED, Cause, Outcome, State, cause, figures, verdict

LOOK = 1.0  # seconds between two looks at a step of ours
UNSTARTED = "JobLaunchFailure"  # the reason of a job whose script or log a node could not open
LAST = 2.0  # seconds until the next question to Slurm once the run has said how it ended
# An interrupt during a step: the signal to the host, and what it does there (see hpc_mp.supervisor.srun.Signals).
ON_INTERRUPT = (
    (signal.SIGUSR2, "saving at the next step, then stopping; once more (Ctrl-C or SIGTERM) kills"),
    (signal.SIGINT, "killed: steps since the last checkpoint are lost"),
)


def launch_job(plan: Plan, resumed: Resumed | None, follow: bool, say: Callable[[str], None]) -> Outcome:
    """Submit the script, and ``slurm.chain`` times more behind it. ``follow``: wait for the end; Ctrl-C then ends the
    waiting, not the job.

    Raises:
        HpcMpError: the run directory cannot be written.
    """
    with begin(plan, resumed) as (run, number, _):
        attempt = AttemptReader(run, number)
        stage_environment(plan.spec, run)
        try:
            jobs = _submit(plan, run, say)
        except RunFailed as refused:
            return Outcome(run.path, "failed", cause=Cause("launcher", str(refused)), **figures(run, number))
    say(f"run       {run.path}\njob       {', then '.join(jobs)}")
    if not follow:
        return Outcome(run.path, "submitted", jobs[0])
    try:
        with progress_for(plan.spec.train.steps) as progress:
            end = wait(jobs, _Shown([attempt], progress))[jobs[0]]
    except KeyboardInterrupt:
        say(f"no longer waiting: job {jobs[0]} goes on, `hpc-mp cancel {run.path}` ends it")
        return _conclude(plan, attempt, jobs[0], None)
    return _conclude(plan, attempt, jobs[0], end)


def launch_array(plans: Sequence[Plan], follow: bool, say: Callable[[str], None]) -> tuple[Outcome, ...]:
    """Submit one script for all elements of ``slurm.array``; the outcome of each. Otherwise as ``launch_job``."""
    runs = begin_array(plans)
    attempts = [AttemptReader(run, 1) for run in runs]
    stage_environment(plans[0].spec, *runs)
    try:
        submission = sbatch(runs[0].script)
    except RunFailed as refused:
        return tuple(Outcome(run.path, "failed", cause=Cause("launcher", str(refused))) for run in runs)
    ids = [f"{submission.job_id}_{number}" for number in range(len(runs))]
    for run, job_id in zip(runs, ids, strict=True):
        write_text(run.job_id, f"{job_id}\n")
    say("\n".join(filter(None, (submission.words, *(f"run       {run.path}" for run in runs), f"job       {submission.job_id}"))))
    ends: Mapping[str, SlurmJob] = {}
    if follow:
        try:
            with progress_for(plans[0].spec.train.steps) as progress:
                ends = wait(ids, _Shown(attempts, progress))
        except KeyboardInterrupt:
            say(f"no longer waiting: job {submission.job_id} goes on, scancel {submission.job_id} ends it")
    return tuple(_conclude(plan, attempt, job_id, ends.get(job_id))
                 for plan, attempt, job_id in zip(plans, attempts, ids, strict=True))


def _conclude(plan: Plan, attempt: AttemptReader, job_id: str, end: SlurmJob | None) -> Outcome:
    """What became of a run; ``end`` is what Slurm said last of its job, None while nobody has waited for that."""
    if end is None:
        return Outcome(attempt.run.path, "submitted", job_id, **figures(attempt.run, attempt.number))
    return _ended(attempt, job_id, lambda: _guess(end, attempt, plan.spec.train.steps))


def _ended(attempt: AttemptReader, job_id: str | None, guess: Callable[[], tuple[State, Cause | None]]) -> Outcome:
    """The outcome of a run that has ended: the verdict's word; without a verdict ``guess`` makes one, which is written down."""
    run = attempt.run
    numbers, found = figures(run, attempt.number), verdict(run)
    if found is not None:
        return Outcome(run.path, found.state, job_id, cause=found.cause, report=found.report, **numbers)
    state, why = guess()
    return conclude(Outcome(run.path, state, job_id, cause=why, **numbers), run.attempt())


def _submit(plan: Plan, run: RunDirectory, say: Callable[[str], None]) -> list[str]:
    """The ids of the job and of those behind it. Raises RunFailed."""
    jobs: list[str] = []
    for _ in range(1 + plan.spec.slurm.chain):
        try:
            submission = sbatch(run.script, [f"--dependency=afterany:{jobs[-1]}"] if jobs else ())
        except RunFailed as refused:
            if not jobs:
                raise
            say(f"only {len(jobs) - 1} of slurm.chain = {plan.spec.slurm.chain} jobs are queued behind: {refused}")
            break
        if submission.words and not jobs:
            say(submission.words)
        jobs.append(submission.job_id)
        if len(jobs) == 1:
            write_text(run.job_id, f"{jobs[0]}\n")
    if len(jobs) > 1:
        record_successors(run, jobs)
    return jobs


def launch_step(plan: Plan, resumed: Resumed | None, job_id: str, say: Callable[[str], None]) -> Outcome:
    """Run the script as a step of the allocation ``job_id``, to its end. Raises HpcMpError as ``launch_job`` does."""
    with begin(plan, resumed) as (run, number, lock):
        stage_environment(plan.spec, run)
        return follow_host(plan, run, number, lock, step_command(run.script), step_environment(), job_id,
                           run.slurm_log(job_id), say)


def follow_host(
    plan: Plan, run: RunDirectory, number: int, lock: int, command: Sequence[str], environ: Mapping[str, str],
    job_id: str | None, log: Path, say: Callable[[str], None],
) -> Outcome:
    """Run the host (``hpc_mp.supervisor``) as a child, to its end, with progress; the first interrupt saves, the second kills.

    Args:
        number: of the attempt.
        lock: the run's open lock file, held as long as the host lives.
        log: gets what the host says.
    """
    say(f"run       {run.path}")
    attempt = AttemptReader(run, number)
    with open(log, "ab") as output, Interrupts() as interrupts, progress_for(plan.spec.train.steps) as progress:
        host = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                start_new_session=True, pass_fds=[lock])
        code = _follow(host, attempt, interrupts, progress)
    if code == STOPPED:
        return Outcome(run.path, "stopped", job_id, **figures(run, number))
    said = Cause("launcher", f"the job {ending(code)}; its log is {log}")
    return _ended(attempt, job_id, lambda: ("failed", cause(run) or said) if code else ("completed", None))


class _Shown:
    """Between two looks at the queue: progress from the run directories, and why a job waits whenever that is new."""

    def __init__(self, attempts: Sequence[AttemptReader], progress: Progress) -> None:
        self._attempts, self._progress = attempts, progress
        self._said = ""

    def __call__(self, jobs: Mapping[str, SlurmJob], seconds: float) -> None:
        job = next((job for job in jobs.values() if not job.ended), next(iter(jobs.values())))
        words = ". ".join(filter(None, (f"job {job.id} waits: {job.reason}", job.meaning, job.remedy)))
        if job.waits and job.reason not in ("", "None") and words != self._said:
            self._said = words
            self._progress.note(words)
        waiting = {"phase": job.state.lower(), "detail": job.reason, "done": 0, "total": 0}
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for attempt in self._attempts:
                self._progress.update(attempt.status() or waiting, attempt.steps())
            if all(verdict(attempt.run) for attempt in self._attempts):  # the job is about to end
                time.sleep(min(left, LAST))
                break
            time.sleep(min(left, self._progress.interval or LOOK))


def _guess(job: SlurmJob, attempt: AttemptReader, steps: int) -> tuple[State, Cause | None]:
    """The state of a run whose job never said how it ended: from Slurm's word and the steps that were done."""
    if figures(attempt.run, attempt.number)["steps"] == steps and job.state in ("COMPLETED", "FORGOTTEN"):
        return "completed", None
    if job.state in STOPPING:
        return "stopped", None
    log = attempt.run.slurm_log(job.id)
    where = f"its log is {log}"
    if job.reason == UNSTARTED and not log.exists():
        where = f"its node could not begin a log: job.directory must lie where all nodes see it, and do they see {log.parent}?"
    said = Cause("launcher", f"Slurm job {job.id} ended as {job.state}{f' ({job.reason})' if job.reason else ''}; {where}")
    return "failed", cause(attempt.run) or said


def _follow(step: subprocess.Popen[bytes], attempt: AttemptReader, interrupts: Interrupts, progress: Progress) -> int:
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
