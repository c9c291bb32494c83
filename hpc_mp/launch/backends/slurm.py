"""``--on slurm``: a plan as a Slurm job, with the chained jobs behind it, or as an array of jobs."""

import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_mp.base.assets import asset_table
from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import shown
from hpc_mp.cluster.slurm.jobs import STOPPING, SlurmJob, release, wait
from hpc_mp.cluster.slurm.query import NO_CONTROLLER
from hpc_mp.cluster.slurm.submit import SubmissionRefused, one_line, sbatch
from hpc_mp.cluster.slurm.submit import rehearse as test_only
from hpc_mp.diagnosis.cause import cause
from hpc_mp.job import AnySpec
from hpc_mp.job.sweep import words_of
from hpc_mp.launch.backends.backend import CallRequest, Launch, RehearsedPlans, SubmittedTasks, concluded
from hpc_mp.launch.choices import slurm_gpus
from hpc_mp.launch.facts import ask_cluster
from hpc_mp.launch.fit import check_fit, never_starts
from hpc_mp.launch.listener import Listener
from hpc_mp.launch.model_check import check_model
from hpc_mp.launch.plan import JobPlan, Target, without_avoiding
from hpc_mp.launch.render import JobScript
from hpc_mp.launch.run_files import begin, begin_sweep, next_runs, script, withdrawn
from hpc_mp.launch.staging.archive import stage_environment
from hpc_mp.report.conclude import conclude
from hpc_mp.rundir import RunDirectory, write_text
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.outcome import Cause, Outcome, State, figures, together, verdict
from hpc_mp.rundir.records import RankStatus
from hpc_mp.rundir.runs import record_successors
from hpc_mp.runs.status import words_of_job
from hpc_mp.supervisor.exclusions import end_watch, watch_waiting

POLL_S = 1.0  # between two polls of a run directory
LAST_S = 2.0  # until the next query to Slurm once the run has its verdict
UNSTARTED = "launch_failed_requeued_held"  # reason of a job that no node started; also after a slurmctld was killed
RELEASES = 3  # releases of such a job while the launch waits for it

TARGET = Target("in a new Slurm job", ask_cluster, slurm_gpus, in_script=True, fits=check_fit)


def start(launch: Launch) -> Outcome:
    """Submit the script, and ``slurm.chain`` more times behind it; for a sweep one script for all its runs. With ``wait``, wait
    for the end; Ctrl-C then ends the waiting, not the job. Raises HpcMpError if Slurm refuses the job, or the run directory
    cannot be written. Nothing is left of a new run then."""
    launch.check(check_model)
    rehearsal = rehearse(launch.plans, next_runs(launch.plans, launch.resumed))
    launch.listener.say(rehearsal.message)
    launch = replace(launch, plans=rehearsal.plans)
    return _job(launch, rehearsal.script) if len(launch.plans) == 1 else together(_array(launch, rehearsal.script))


NO_JOB = re.compile(r"\bJob \d+ to(?= start)")  # the number of a job that was not created


def rehearse(plans: tuple[JobPlan, ...], runs: Sequence[Path]) -> RehearsedPlans:
    """Have Slurm test the script of these plans. If it accepts them only with the nodes that we avoid, the returned plans do not
    avoid them. Raises HpcMpError if it would refuse the script, or never start its job."""
    text = script(plans[0], *runs)
    try:
        return RehearsedPlans(plans, text, _tested(plans[0], text.text))
    except HpcMpError:
        if not any(plan.avoided for plan in plans):
            raise
        freed = tuple(map(without_avoiding, plans))
        text = script(freed[0], *runs)
        message = f"nodes     after all {freed[0].resolution.exclude.why}\n{_tested(freed[0], text.text)}"
        return RehearsedPlans(freed, text, message)


def _tested(plan: JobPlan, text: str) -> str:
    answer = test_only(text, plan.spec.slurm.partition) if plan.facts.silence is None else None
    if answer is None or answer.state == "untested":
        return f"slurm     has not tested the script: {plan.facts.silence if answer is None else answer.words}"
    if answer.state == "refused":
        value, remedy = _refused_key(plan.spec, answer.words)
        raise HpcMpError(value, f"is refused by Slurm (sbatch --test-only): {answer.words}", remedy)
    warning = "warning: it will wait until nodes are back: " if answer.state == "waits" else ""
    if answer.state == "accepted" and "\n#SBATCH --dependency=" in text:
        return "slurm     sbatch takes the script; when it starts depends on slurm.depends"
    return f"slurm     {warning}{NO_JOB.sub('it would', answer.words)}"


def _refused_key(spec: AnySpec, message: str) -> tuple[str, str]:
    """Return the key of the job file that Slurm refuses, as the user wrote it, and the remedy."""
    for key, (pattern, remedy) in asset_table("slurm/refusals.toml").items():
        section, name = key.split(".")
        value = getattr(getattr(spec, section), name)
        if value is not None and re.search(pattern, message):
            return f"{key} = {shown(value)}", remedy
    return f"the job script of {spec.job.name!r}", "mend what these words name"


def _job(launch: Launch, rendered: JobScript) -> Outcome:
    plan, listener = launch.plan, launch.listener
    with begin(plan, launch.resumed, rendered) as (run, number, _):
        attempt = AttemptReader(run, number)
        with withdrawn(() if launch.resumed else (run,)):
            stage_environment(plan.spec, listener, run)
            try:
                jobs = _submit(plan, run, listener)
            except SubmissionRefused as refused:
                if launch.resumed is not None:  # its earlier attempts stay, and its status is this refusal
                    failed = Outcome(run.path, "failed", cause=Cause("launcher", str(refused)), **figures(run, number))
                    conclude(failed, number, listener.note)
                raise _refused(refused) from None
    listener.say(f"run       {run.path}\njob       {', then '.join(jobs)}")
    if not launch.wait:
        return Outcome(run.path, "submitted", jobs[0])
    try:
        with listener.following(plan.steps):
            end = wait(jobs, _QueueWatcher([attempt], plan.spec, listener))[jobs[0]]
    except KeyboardInterrupt:
        listener.say(f"no longer waiting: job {jobs[0]} goes on, `hpc-mp cancel {run.path}` ends it")
        return _ended(launch, attempt, jobs[0], None)
    return _ended(launch, attempt, jobs[0], end)


def submit(request: CallRequest) -> SubmittedTasks:
    """Queue a Python callable as a job. Raises HpcMpError for an unknown option of submitit, RunFailed if sbatch refuses."""
    from hpc_mp.launch.submit.tasks import SlurmTasks  # submitit is slow to import

    return SlurmTasks(request)


def _array(launch: Launch, rendered: JobScript) -> tuple[Outcome, ...]:
    plans, listener = launch.plans, launch.listener
    runs = begin_sweep(plans, rendered)
    attempts = [AttemptReader(run, 1) for run in runs]
    with withdrawn(runs):
        stage_environment(plans[0].spec, listener, *runs)
        try:
            submission = sbatch(runs[0].script)
        except SubmissionRefused as refused:
            raise _refused(refused) from None
    ids = [f"{submission.job_id}_{number}" for number in range(len(runs))]
    for run, job_id in zip(runs, ids, strict=True):
        write_text(run.job_id, f"{job_id}\n")
    listener.say("\n".join(filter(None, (submission.words, f"job       {submission.job_id}",
                                         *(f"run       {run.path}  {words_of(plan.member.values) if plan.member else ''}".rstrip()
                                           for run, plan in zip(runs, plans, strict=True))))))
    ends: Mapping[str, SlurmJob] = {}
    if launch.wait:
        try:
            with listener.following(plans[0].steps):
                ends = wait(ids, _QueueWatcher(attempts, plans[0].spec, listener))
        except KeyboardInterrupt:
            listener.say(f"no longer waiting: job {submission.job_id} goes on, `hpc-mp cancel {runs[0].path} --all` ends it")
    return tuple(_ended(launch, attempt, job_id, ends.get(job_id)) for attempt, job_id in zip(attempts, ids, strict=True))


def _refused(refused: SubmissionRefused) -> HpcMpError:
    """Return sbatch's refusal, word for word. The script's path is left out: the script was removed with its run."""
    silent = any(phrase in refused.words for phrase in NO_CONTROLLER)
    unset = "SLURM_CONF is not set: export it where slurm.conf lies elsewhere, " if "SLURM_CONF" not in os.environ else ""
    return HpcMpError("the job", f"was not taken by Slurm: {one_line(refused.words)}",
                      f"{unset}launch on a machine of the cluster where sinfo answers, or try it here with --on local" if silent
                      else "mend what these words name, and launch again")


def _ended(launch: Launch, attempt: AttemptReader, job_id: str, end: SlurmJob | None) -> Outcome:
    """Return the outcome of a run. ``end``: the final state of its job in Slurm; None if the launch did not wait for it."""
    if end is None:
        return Outcome(attempt.run.path, "submitted", job_id, **figures(attempt.run, attempt.number))
    return concluded(launch, attempt, job_id, lambda: _guess(end, attempt, launch.plan.steps))


def _submit(plan: JobPlan, run: RunDirectory, listener: Listener) -> list[str]:
    """Submit the job and those behind it, and return their ids. Raises SubmissionRefused."""
    jobs: list[str] = []
    if plan.avoided:
        refused = watch_waiting(run, plan.spec, [finding.node for finding in plan.avoided])  # it may start before we know the id
        if refused is not None:
            listener.note(f"nobody takes the avoided nodes back while the job waits: {refused}")
    for _ in range(1 + plan.spec.slurm.chain):
        try:
            submission = sbatch(run.script, [f"--dependency=afterany:{jobs[-1]}"] if jobs else ())
        except SubmissionRefused as refused:
            if not jobs:
                end_watch(run)
                raise
            listener.say(f"only {len(jobs) - 1} of slurm.chain = {plan.spec.slurm.chain} jobs are queued behind: {refused}")
            break
        if submission.words and not jobs:
            listener.say(submission.words)
        jobs.append(submission.job_id)
        if len(jobs) == 1:
            write_text(run.job_id, f"{jobs[0]}\n")
    if len(jobs) > 1:
        record_successors(run, jobs)
    return jobs


class _QueueWatcher:
    """The work between two polls of the queue: progress from the run directories, and new reasons why a job waits."""

    def __init__(self, attempts: Sequence[AttemptReader], spec: AnySpec, listener: Listener) -> None:
        self._attempts, self._spec, self._listener = attempts, spec, listener
        self._noted = ("", "")
        self._releases: Counter[str] = Counter()  # by job

    def __call__(self, jobs: Mapping[str, SlurmJob], seconds: float) -> None:
        job = next((job for job in jobs.values() if not job.ended), next(iter(jobs.values())))
        looked_at = job.reason not in ("", "None")
        plain = never_starts(job, self._spec) if job.waits and looked_at and (job.id, job.reason) != self._noted else None
        if plain is not None:
            self._noted = (job.id, job.reason)
            self._listener.note(". ".join(filter(None, (f"job {job.id} waits: {job.reason}", plain.meaning, plain.remedy))))
        for unstarted in jobs.values():
            if unstarted.waits and unstarted.reason.replace(" ", "_") == UNSTARTED and self._releases[unstarted.id] < RELEASES:
                self._release(unstarted.id)
        waiting = RankStatus(0, job.state.lower(), job.reason if looked_at else "not looked at yet" if job.waits else "")
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            for attempt in self._attempts:
                self._listener.update(waiting if job.waits else attempt.status() or waiting, attempt.steps())
                self._listener.evaluated(attempt.evaluations())
            if all(verdict(attempt.run) for attempt in self._attempts):  # the job is about to end
                time.sleep(min(remaining, LAST_S))
                break
            time.sleep(min(remaining, self._listener.interval or POLL_S))

    def _release(self, job_id: str) -> None:
        self._releases[job_id] += 1
        try:
            release(job_id)
        except CommandFailed as error:
            self._listener.note(f"job {job_id} cannot be released: {one_line(str(error))}")
        else:
            self._listener.note(f"job {job_id} is released ({self._releases[job_id]} of {RELEASES} times)")


def _guess(job: SlurmJob, attempt: AttemptReader, steps: int) -> tuple[State, Cause | None]:
    """Return the state of a run without a verdict, from its job's state in Slurm and the steps done."""
    if steps in (0, figures(attempt.run, attempt.number)["steps"]) and job.state in ("COMPLETED", "FORGOTTEN"):
        return "completed", None
    if job.state in STOPPING:
        return "stopped", None
    log = attempt.run.slurm_log(job.id)
    fallback = Cause("launcher", words_of_job(attempt.run, job), log=str(log) if log.exists() else None)
    return "failed", cause(attempt.run) or fallback
