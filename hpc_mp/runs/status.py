"""The state of a run, from Slurm if it has a job, and from the run directory, which takes precedence."""

import json
import re
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from hpc_mp.base.command import Runner
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.exit_codes import ending
from hpc_mp.cluster.bad_nodes import BadNode, read_exclusions
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.jobs import FORGOTTEN, STOPPING, UNKNOWN, SlurmJob
from hpc_mp.diagnosis.cause import cause
from hpc_mp.job import AnySpec, JobSpec, ProgramSpec, load_resolved
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.attempt import AttemptReader, last_words, tail
from hpc_mp.rundir.checkpoints import complete_steps
from hpc_mp.rundir.expected import ObservedSteps, observe
from hpc_mp.rundir.history import known_history
from hpc_mp.rundir.outcome import Outcome, verdict
from hpc_mp.rundir.plan import RunPlan, read_plan
from hpc_mp.rundir.records import AWAITING, Evaluation, StepMetrics, last_records, losses, read_records
from hpc_mp.rundir.retention import BestCheckpoint, best_checkpoint
from hpc_mp.rundir.runs import SweepMember, read_member, successors
from hpc_mp.rundir.usage import Usage, usage
from hpc_mp.runs.keepers import keeper
from hpc_mp.runs.lock import held

RECENT = 20  # steps whose median time predicts the rest
STIRS_S = 120.0  # live ranks have written something within this time
LATE_STEPS, LATE_S = 3.0, 15.0  # a step is late at this multiple of the usual time and this many seconds
SLOW_PHASES = ("saving", "evaluating", AWAITING)  # of rank 0, between two steps
NAMED = ("local", "mpi")  # back ends that are selected only by name if Slurm is present
AGAIN = ("requeue", "wait")  # actions at an attempt's end that continue the run
GOES_ON = ("pending", "running", "unknown")
BEGINS = re.compile(r"hpc-mp: \d\d:\d\d:\d\d attempt \d+ \(")  # the supervisor's first line
UNSTARTED = "JobLaunchFailure"  # the reason of a job whose script or log a node could not open
UNREADABLE = "unreadable"  # the state, in a list, of a run whose job file this release cannot read


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run.

    Attributes:
        state: "pending", "running", "completed", "failed", "stopped", or "unknown" (Slurm does not answer, and the run
            directory does not show it).
        attempt: number from 1.
        job: Slurm job that runs, or comes next; None for emulated nodes and for a step of an allocation.
        successors: the jobs that continue after it, in their order.
        phase: rank 0's activity.
        step, steps: steps finished, and steps in all; 0 if unknown.
        evaluation: the newest one on held-out text. best: the best checkpoint on it.
        tokens_per_s, mfu: throughput of the last step, and its share of the GPUs' peak; None if unknown.
        eta, step_age: seconds until the end of the last step, and since the newest one.
        checkpoint: the newest one.
        cause: cause of a failure.
        late: True if its step takes much longer than those before it; ``eta`` is None then.
        before: end of the attempt after which it was, or will be, restarted; None without one.
        sweep: its place in its sweep; None outside of a sweep.
        usage: its cost.
        plan: predictions and choices; None for ranks that were started by hand.
        observed: its steps, compared with the plan; None if nothing was predicted, or too few steps are done.
        excluded: nodes that we exclude for its job, with the evidence, without the user's own exclusions.
    """

    run: Path
    state: str
    attempt: int
    job: SlurmJob | None
    successors: tuple[SlurmJob, ...]
    phase: str | None
    step: int
    steps: int
    loss: float | None
    evaluation: Evaluation | None
    tokens_per_s: float | None
    eta: float | None
    step_age: float | None
    checkpoint: Path | None
    cause: str | None
    late: bool = False
    before: str | None = None
    sweep: SweepMember | None = None
    usage: Usage | None = None
    plan: RunPlan | None = None
    excluded: tuple[BadNode, ...] = ()
    best: BestCheckpoint | None = None
    mfu: float | None = None
    observed: ObservedSteps | None = None

    @property
    def ended(self) -> bool:
        return self.state in ("completed", "failed", "stopped")

    def document(self) -> dict[str, Any]:
        """Return the document for ``--json``."""
        best = {"best": {"path": self.best.path, **asdict(self.best.evaluation)}} if self.best else {}
        text = json.dumps(asdict(self) | best, default=str)
        return cast("dict[str, Any]", json.loads(text, parse_constant=lambda _: None))  # JSON has no NaN


def described(runs: Sequence[RunDirectory], ask: Runner = queue.patient) -> list[list[SlurmJob]]:
    """Return the jobs of each run in their order, with one query to Slurm. A run without a job of its own has none."""
    groups = [keeper(run).job_ids(run) for run in runs]
    ids = list(dict.fromkeys(job_id for group in groups for job_id in group))
    jobs = queue.job_states(ids, ask) if ids else {}
    return [[jobs[job_id] for job_id in group] for group in groups]


def overview(run: RunDirectory, ask: Runner = queue.patient,
             explain: Callable[[SlurmJob, AnySpec, Runner], SlurmJob] = lambda job, _spec, _ask: job) -> RunStatus:
    """Return the state of a run, from its directory and one query to Slurm about its job and the jobs behind it. ``explain``:
    returns a waiting job with the reason why it can never start, if it cannot."""
    (jobs,) = described([run], ask)
    return seen(run, [explain(job, load_resolved(run.job), ask) for job in jobs])


def overviews(runs: Sequence[RunDirectory], ask: Runner = queue.patient) -> list[RunStatus]:
    """Return the states of many runs, with one query to Slurm."""
    return [seen(run, jobs) for run, jobs in zip(runs, _jobs(runs, ask), strict=True)]


def listed(runs: Sequence[RunDirectory], ask: Runner = queue.patient) -> list[RunStatus]:
    """Return the states for a list; a run whose files cannot be read is ``UNREADABLE``."""
    return [_listed(run, jobs) for run, jobs in zip(runs, _jobs(runs, ask), strict=True)]


def _jobs(runs: Sequence[RunDirectory], ask: Runner) -> list[list[SlurmJob]]:
    """Return the jobs of each run. Slurm is not asked about runs that have a verdict and no jobs behind them."""
    open_runs = [run for run in runs if verdict(run) is None or successors(run)]
    jobs = dict(zip(open_runs, described(open_runs, ask), strict=True))
    return [jobs.get(run, []) for run in runs]


def _listed(run: RunDirectory, jobs: Sequence[SlurmJob]) -> RunStatus:
    try:
        return seen(run, jobs)
    except (HpcMpError, OSError) as error:
        return RunStatus(run.path, UNREADABLE, 1, None, (), None, 0, 0, None, None, None, None, None, None, str(error))


def seen(run: RunDirectory, jobs: Sequence[SlurmJob]) -> RunStatus:
    """Return the state of a run for given states of its jobs, in their order; without a query."""
    job = next((job for job in jobs if not job.ended), jobs[0] if jobs else None)
    successor_jobs = tuple(successor for successor in jobs[jobs.index(job) + 1:] if not successor.ended) if job else ()
    attempt, spec = run.attempt(), load_resolved(run.job)
    steps = spec.train.steps if isinstance(spec, JobSpec) else 0
    status = AttemptReader(run, attempt).status()
    phase = status.phase if status else None
    outcome = verdict(run, attempt)
    records = last_records(run.metrics, StepMetrics, RECENT)
    recent = [record for record in records if record.attempt == attempt]
    last = records[-1] if records else None
    step = last.step if last else 0
    awaits = phase == AWAITING
    doing = f"{phase} {status.detail}" if status is not None and awaits else phase
    recorded = _recorded(phase, outcome, done=steps in (0, step))
    if job is not None and job.state == FORGOTTEN and recorded is None and _stirs(run):
        job = replace(job, state=UNKNOWN)  # its controller has lost it, and its ranks continue
    state = _state(job, recorded, held(run), run.stop.exists())
    pace = statistics.median(record.step_time_s for record in recent) if recent else None
    step_age = max(0.0, time.time() - run.metrics.stat().st_mtime) if recent else None
    late = (state == "running" and phase not in SLOW_PHASES and pace is not None and step_age is not None
            and step_age > max(LATE_STEPS * pace, LATE_S))
    loss = next(reversed(losses(records)), None)
    if records and loss is None:
        loss = next(reversed(losses(read_records(run.metrics, StepMetrics))), None)
    return RunStatus(
        run.path, state, attempt, job, successor_jobs, doing, step, steps, loss,
        next(reversed(read_records(run.evaluations, Evaluation)), None),
        last.tokens_per_s if last else None,
        eta=pace * (steps - step) if pace is not None and steps and state == "running" and not (late or awaits) else None,
        step_age=step_age,
        checkpoint=next(reversed(complete_steps(run.checkpoints)), None),
        cause=_cause(run, attempt, job, outcome) if state == "failed" or (state == "stopped" and outcome and outcome.cause)
        else None,
        late=late,
        before=_before(run, attempt, job, isinstance(spec, ProgramSpec)) if state in GOES_ON or attempt > 1 else None,
        sweep=read_member(run),
        usage=usage(run, time.time() if state in ("pending", "running") else None, waits=state == "pending"),
        plan=read_plan(run),
        excluded=read_exclusions(run.excluded) if job is not None and not job.ended else (),
        best=best_checkpoint(run),
        mfu=last.mfu if last and last.mfu > 0 else None,
        observed=observe(run, attempt))


def go_on(run: RunDirectory) -> str:
    """Return the command that resumes an ended run on the same back end."""
    plan = read_plan(run)
    on = ["--on", plan.place] if plan is not None and plan.place in NAMED else []
    return shlex.join(["hpc-mp", "launch", str(run.job), *on, "--resume"])


def _state(job: SlurmJob | None, recorded: str | None, held: bool, stop_requested: bool) -> str:
    """Return the state. ``recorded``: the end according to the run directory; ``stop_requested``: True if the user asked for the
    end. Slurm forgets the jobs of an array that are cancelled before they start."""
    if job is None:
        return "running" if held and recorded is None else recorded or "failed"
    if job.waits:
        return "pending"
    if job.state == UNKNOWN:
        return recorded or "unknown"
    if not job.ended:
        return recorded or "running"
    if recorded is not None:
        return recorded
    return "completed" if job.state == "COMPLETED" else "stopped" if job.state in STOPPING or (
        stop_requested and job.state == FORGOTTEN) else "failed"


def _stirs(run: RunDirectory) -> bool:
    """Return True if its ranks or its supervisor have written anything recently."""
    files = (run.status, run.metrics, *(run.log.iterdir() if run.log.is_dir() else ()))
    return any(file.exists() and time.time() - file.stat().st_mtime < STIRS_S for file in files)


def _recorded(phase: str | None, outcome: Outcome | None, done: bool) -> str | None:
    """Return the end of this attempt according to the run directory; None before its end."""
    if outcome is not None:
        return outcome.state
    if phase == "done" and done:
        return "completed"
    return "stopped" if phase == "stopped" else None


def _before(run: RunDirectory, attempt: int, job: SlurmJob | None, of_program: bool) -> str | None:
    """Return the end of the attempt after which the run was, or will be, restarted."""
    ends = [end for end in known_history(run) if end.attempt <= attempt and end.action in AGAIN]
    ended = next((end for end in ends if end.attempt == attempt), None)
    if ended is not None:
        saved = "" if of_program else f", saved up to step {ended.step}"  # a program's saved state is unknown
        return f"attempt {attempt}{saved}: {ended.message}"
    if job is not None and job.waits and job.restarts and run.attempt_record.exists():
        return f"attempt {attempt}: Slurm has ended it and queued its job again, as where one of its nodes fails"
    if attempt == 1:
        return None
    failure, outcome = cause(run, attempt - 1), verdict(run, attempt - 1)
    restart = next((end.message for end in ends if end.attempt == attempt - 1), None)  # a departure has no cause
    message = failure.message if failure is not None else outcome.state if outcome is not None else restart
    return None if message is None else f"attempt {attempt - 1}: {message}"


def _cause(run: RunDirectory, attempt: int, job: SlurmJob | None, outcome: Outcome | None) -> str:
    failure = outcome.cause if outcome is not None else cause(run, attempt)
    if failure is not None:
        return failure.message
    if job is None:
        return "it ended without a word: its launcher was killed, or its machine went down"
    return words_of_job(run, job)


def words_of_job(run: RunDirectory, job: SlurmJob) -> str:
    """Return how a job without a verdict ended: in Slurm's words, and the last words of its script."""
    if (unstarted := _unstarted_words(run, job)) is not None:
        return f"Slurm job {job.id} ended as {job.state}: {unstarted}"
    code = f", the job script {ending(job.exit_code)}" if job.exit_code else ""
    reason = f" ({job.meaning or job.reason})" if job.reason not in ("", UNSTARTED) else ""  # a killed script has it too
    message = last_words([line for line in tail(run.slurm_log(job.id)) if not BEGINS.match(line)])
    return f"Slurm job {job.id} ended as {job.state}{code}{reason}" + (f"; its last words: {message}" if message else "")


def _unstarted_words(run: RunDirectory, job: SlurmJob) -> str | None:
    """Return a hint if a node could not open the script or its log; None if it could."""
    log = run.slurm_log(job.id)
    if job.reason != UNSTARTED or log.exists():
        return None
    return f"its node could not begin a log: job.directory must lie where all nodes see it, and do they see {log.parent}?"
