"""What a run is doing: Slurm's word where there is a job, and the run directory, which has the last one."""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from hpc_mp.base.command import Runner
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.exit_codes import ending
from hpc_mp.cluster.bad_nodes import BadNode
from hpc_mp.cluster.exclusions import read_exclusions
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.job import FORGOTTEN, STOPPING, UNKNOWN, SlurmJob
from hpc_mp.diagnosis.cause import cause
from hpc_mp.job import JobSpec, ProgramSpec, load_any
from hpc_mp.launch.find import job_of
from hpc_mp.launch.fit import never_starts
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.attempt import AttemptReader, last_words, tail
from hpc_mp.rundir.checkpoints import complete_steps
from hpc_mp.rundir.history import known_history
from hpc_mp.rundir.outcome import Verdict, verdict
from hpc_mp.rundir.plan import RunPlan, read_plan
from hpc_mp.rundir.records import AWAITING, Evaluation, StepMetrics, last_records, losses, read_records
from hpc_mp.rundir.retention import BestCheckpoint, best_checkpoint
from hpc_mp.rundir.runs import successors
from hpc_mp.rundir.sweep import SweepMember, read_member
from hpc_mp.rundir.usage import Usage, usage

RECENT = 20  # steps whose median time foretells the rest
STIRS_S = 120.0  # within which ranks that go on have written something
LATE_STEPS, LATE_S = 3.0, 15.0  # a step is late when it takes so many times as long as those before it, and so many seconds
SLOW_PHASES = ("saving", "evaluating", AWAITING)  # of rank 0, between two steps
NAMED = ("local", "mpi")  # back ends that are chosen by name alone where there is a Slurm
AGAIN = ("requeue", "wait")  # what was done about an attempt's end so that the run goes on
GOES_ON = ("pending", "running", "unknown")
BEGINS = re.compile(r"hpc-mp: \d\d:\d\d:\d\d attempt \d+ \(")  # what the supervisor says first
UNSTARTED = "JobLaunchFailure"  # the reason of a job whose script or log a node could not open
UNREADABLE = "unreadable"  # the state, in a list, of a run whose job file this release does not understand


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What a run is doing.

    Attributes:
        state: "pending", "running", "completed", "failed", "stopped", or "unknown" (Slurm does not answer, and the run
            directory does not tell).
        attempt: from 1.
        job: of Slurm: that which runs, or comes next; None for emulated nodes and for a step of an allocation.
        successors: the jobs that carry on after it, in their order.
        phase: what rank 0 says it is doing.
        step, steps: finished, and to do in all; 0 where nobody knows it.
        evaluation: the newest one on held-out text. best: the checkpoint with the least loss on it.
        tokens_per_s: of the last step; eta, step_age: seconds until the last step ends, and since one did.
        checkpoint: the newest one.
        cause: of a failure.
        late: whether its step takes much longer than those before it; there is no ``eta`` then.
        before: how the attempt ended after which it was started again, or is to be; None where there was none.
        sweep: its place in the sweep that it belongs to; None where it belongs to none.
        usage: what it has cost.
        plan: what was predicted and chosen; None for ranks that were started by hand.
        excluded: the nodes that we keep its job off, with the evidence; those that its user excludes are not among them.
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

    @property
    def ended(self) -> bool:
        return self.state in ("completed", "failed", "stopped")

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        text = json.dumps(asdict(self), default=str)
        return cast("dict[str, Any]", json.loads(text, parse_constant=lambda _: None))  # JSON knows no NaN


def overview(run: RunDirectory, ask: Runner = queue.patient) -> RunStatus:
    """Look at the run directory, and ask Slurm once about its job and the jobs behind it."""
    ids = job_ids(run)
    jobs = queue.job_states(ids, ask) if ids else {}
    return seen(run, [never_starts(jobs[job_id], load_any(run.job), ask) for job_id in ids])


def overviews(runs: Sequence[RunDirectory], ask: Runner = queue.patient) -> list[RunStatus]:
    """Of many runs, with one question to Slurm."""
    return [seen(run, jobs) for run, jobs in zip(runs, _jobs(runs, ask), strict=True)]


def listed(runs: Sequence[RunDirectory], ask: Runner = queue.patient) -> list[RunStatus]:
    """The same for a list, in which a run whose files are not understood is ``UNREADABLE``."""
    return [_listed(run, jobs) for run, jobs in zip(runs, _jobs(runs, ask), strict=True)]


def _jobs(runs: Sequence[RunDirectory], ask: Runner) -> list[list[SlurmJob]]:
    """Of each run. Slurm is not asked about those that have said how they ended and have no jobs behind them."""
    asked = [job_ids(run) if verdict(run) is None or successors(run) else [] for run in runs]
    ids = list(dict.fromkeys(job_id for each in asked for job_id in each))
    jobs = queue.job_states(ids, ask) if ids else {}
    return [[jobs[job_id] for job_id in each] for each in asked]


def _listed(run: RunDirectory, jobs: Sequence[SlurmJob]) -> RunStatus:
    try:
        return seen(run, jobs)
    except (HpcMpError, OSError) as error:
        return RunStatus(run.path, UNREADABLE, 1, None, (), None, 0, 0, None, None, None, None, None, None, str(error))


def seen(run: RunDirectory, jobs: Sequence[SlurmJob]) -> RunStatus:
    """The overview that goes with what Slurm has said of the run's jobs, in their order; asks nobody."""
    job = next((job for job in jobs if not job.ended), jobs[0] if jobs else None)
    behind = tuple(each for each in jobs[jobs.index(job) + 1:] if not each.ended) if job else ()
    attempt, spec = run.attempt(), load_any(run.job)
    steps = spec.train.steps if isinstance(spec, JobSpec) else 0
    status = AttemptReader(run, attempt).status()
    phase = status.phase if status else None
    found = verdict(run, attempt)
    records = last_records(run.metrics, StepMetrics, RECENT)
    recent = [record for record in records if record.attempt == attempt]
    last = records[-1] if records else None
    step = last.step if last else 0
    awaits = phase == AWAITING
    doing = f"{phase} {status.detail}" if status is not None and awaits else phase
    recorded = _recorded(phase, found, done=steps in (0, step))
    if job is not None and job.state == FORGOTTEN and recorded is None and _stirs(run):
        job = replace(job, state=UNKNOWN)  # its controller has lost it, and its ranks go on
    state = _state(job, recorded, held(run), run.stop.exists())
    pace = statistics.median(record.step_time_s for record in recent) if recent else None
    step_age = max(0.0, time.time() - run.metrics.stat().st_mtime) if recent else None
    late = (state == "running" and phase not in SLOW_PHASES and pace is not None and step_age is not None
            and step_age > max(LATE_STEPS * pace, LATE_S))
    loss = next(reversed(losses(records)), None)
    if records and loss is None:
        loss = next(reversed(losses(read_records(run.metrics, StepMetrics))), None)
    return RunStatus(
        run.path, state, attempt, job, behind, doing, step, steps, loss,
        next(reversed(read_records(run.evaluations, Evaluation)), None),
        last.tokens_per_s if last else None,
        eta=pace * (steps - step) if pace is not None and steps and state == "running" and not (late or awaits) else None,
        step_age=step_age,
        checkpoint=next(reversed(complete_steps(run.checkpoints)), None),
        cause=_cause(run, attempt, job) if state == "failed" or (state == "stopped" and found and found.cause) else None,
        late=late,
        before=_before(run, attempt, job, isinstance(spec, ProgramSpec)) if state in GOES_ON or attempt > 1 else None,
        sweep=read_member(run),
        usage=usage(run, time.time() if state in ("pending", "running") else None, waits=state == "pending"),
        plan=read_plan(run),
        excluded=read_exclusions(run.excluded) if job is not None and not job.ended else (),
        best=best_checkpoint(run))


def job_ids(run: RunDirectory) -> list[str]:
    """The Slurm job of a run, then its successors; empty where the run has no job of its own."""
    first = job_of(run)
    if first is None:
        return []
    return [first, *(job_id for job_id in successors(run, first) if job_id != first)]


def go_on(run: RunDirectory) -> str:
    """The command that goes on with a run that has ended, where it ran."""
    plan = read_plan(run)
    on = ["--on", plan.place] if plan is not None and plan.place in NAMED else []
    return shlex.join(["hpc-mp", "launch", str(run.job), *on, "--resume"])


def held(run: RunDirectory) -> bool:
    """Whether a launcher or a rank on emulated nodes has the run (see ``resume.hold``)."""
    try:
        with open(run.lock, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _state(job: SlurmJob | None, recorded: str | None, held: bool, asked: bool) -> str:
    """``recorded``: how the run directory says that it ended; ``asked``: whether its user has asked for that. Slurm forgets the
    jobs of an array that are cancelled before they start."""
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
        asked and job.state == FORGOTTEN) else "failed"


def _stirs(run: RunDirectory) -> bool:
    """Return if its ranks or its supervisor have written anything lately."""
    files = (run.status, run.metrics, *(run.log.iterdir() if run.log.is_dir() else ()))
    return any(file.exists() and time.time() - file.stat().st_mtime < STIRS_S for file in files)


def _recorded(phase: str | None, found: Verdict | None, done: bool) -> str | None:
    """How the run directory says that this attempt has ended; None while it does not."""
    if found is not None:
        return found.state
    if phase == "done" and done:
        return "completed"
    return "stopped" if phase == "stopped" else None


def _before(run: RunDirectory, attempt: int, job: SlurmJob | None, of_program: bool) -> str | None:
    """How the attempt ended after which the run was, or is to be, started again."""
    ends = [end for end in known_history(run) if end.attempt <= attempt and end.action in AGAIN]
    ended = next((end for end in ends if end.attempt == attempt), None)
    if ended is not None:
        saved = "" if of_program else f", saved up to step {ended.step}"  # nobody knows what a program has saved
        return f"attempt {attempt}{saved}: {ended.message}"
    if job is not None and job.waits and job.restarts and run.attempt_record.exists():
        return f"attempt {attempt}: Slurm has ended it and queued its job again, as where one of its nodes fails"
    if attempt == 1:
        return None
    last, said = cause(run, attempt - 1), verdict(run, attempt - 1)
    again = next((end.message for end in ends if end.attempt == attempt - 1), None)  # of one that had to go there is no cause
    words = last.message if last is not None else said.state if said is not None else again
    return None if words is None else f"attempt {attempt - 1}: {words}"


def _cause(run: RunDirectory, attempt: int, job: SlurmJob | None) -> str:
    found = cause(run, attempt)
    if found is not None:
        return found.message
    if job is None:
        return "it ended without a word: its launcher was killed, or its machine went down"
    return words_of_job(run, job)


def words_of_job(run: RunDirectory, job: SlurmJob) -> str:
    """How a job ended of which nobody has written down why: in Slurm's words, and the last of its script."""
    if (unstarted := _unstarted_words(run, job)) is not None:
        return f"Slurm job {job.id} ended as {job.state}: {unstarted}"
    code = f", the job script {ending(job.exit_code)}" if job.exit_code else ""
    reason = f" ({job.meaning or job.reason})" if job.reason not in ("", UNSTARTED) else ""  # a script that is killed has it too
    words = last_words([line for line in tail(run.slurm_log(job.id)) if not BEGINS.match(line)])
    return f"Slurm job {job.id} ended as {job.state}{code}{reason}" + (f"; its last words: {words}" if words else "")


def _unstarted_words(run: RunDirectory, job: SlurmJob) -> str | None:
    """What to look at where a node could not open the script or its log; None where it could."""
    log = run.slurm_log(job.id)
    if job.reason != UNSTARTED or log.exists():
        return None
    return f"its node could not begin a log: job.directory must lie where all nodes see it, and do they see {log.parent}?"
