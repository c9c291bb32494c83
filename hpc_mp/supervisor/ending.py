"""The end of an attempt: how its ranks ended, and the action that follows."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from hpc_mp.base.command import CommandFailed
from hpc_mp.cluster.bad_nodes import AVOIDED_S, BadNode, Certainty, ledger, read_exclusions, record
from hpc_mp.cluster.slurm.allocation import Allocation
from hpc_mp.cluster.slurm.jobs import time_of
from hpc_mp.cluster.slurm.records import Words
from hpc_mp.cluster.slurm.requeue import await_notice, known_job, mail_at_end, notice_s, queued_again, requeue, start_soon
from hpc_mp.cluster.slurm.submit import withdraw
from hpc_mp.diagnosis.classify import classify
from hpc_mp.diagnosis.evidence import Evidence
from hpc_mp.diagnosis.lines import first_code, gave_up
from hpc_mp.job import JobSpec, ProgramSpec
from hpc_mp.program.stepd import stepd_above
from hpc_mp.report.conclude import conclude
from hpc_mp.rundir import RunDirectory, history
from hpc_mp.rundir.failures import KINDS, read_failures
from hpc_mp.rundir.outcome import STOPPED, Cause, Outcome, figures
from hpc_mp.rundir.rank_env import node_name
from hpc_mp.rundir.records import AWAITING
from hpc_mp.rundir.runs import successors
from hpc_mp.supervisor import node_setup
from hpc_mp.supervisor.context import AttemptContext, SupervisedRun, say_ended, say_phase
from hpc_mp.supervisor.exclusions import end_watch, leave_out
from hpc_mp.supervisor.gather import ScriptLog, gather, node_lost, said_in, user_cancelled
from hpc_mp.supervisor.program import ProgramWatch, ending_of, signalled
from hpc_mp.supervisor.restart_policy import QUEUED_AGAIN, STOPPED_BY_USER, Decision, decide, departure, has_expired
from hpc_mp.supervisor.script import ScriptWatch, record_failure
from hpc_mp.supervisor.signals import EARLY, Signals

ENDS_S = 10.0  # to record the run's end before Slurm ends the job
SHOWN_BY_THE_NODE = ("hardware", "unfit", "unwritable")  # kinds of failure that are more specific than a lost node


Ending = Literal["completed", "stopped"] | Cause


def finish(attempt: AttemptContext, code: int, script: ScriptLog | None, signals: Signals,
           watch: ProgramWatch | ScriptWatch | None, *,
           lost: Cause | None = None, died: Cause | None = None) -> int:
    """Clean up the nodes, judge the end of the ranks, and act on it. Return the exit code of the job. ``code``: srun's exit code.
    ``lost``: the end of srun, if it was killed. ``died``: the end of a supervisor, if nothing else explains the end of the
    ranks."""
    run, retries = attempt.run, attempt.spec.slurm.retries
    if not attempt.is_current():
        return 1
    if watch is not None:
        watch.say_begun()
    requested = signals.stop_requested
    unbegun = code == STOPPED and watch is None and isinstance(attempt.spec, ProgramSpec)  # asked to stop before its ranks began
    if not (unbegun or isinstance(watch, ScriptWatch)):
        code = _first_code(run, code, requested or run.stop.exists())
    run.batch_environ.unlink(missing_ok=True)  # unless a script has read it
    unreached = node_setup.end(attempt, failed=code not in (0, STOPPED))
    job = known_job(attempt.allocation.job_id) if attempt.allocation is not None else {}
    attempt = _with_end(attempt, job)
    cancelled = run.stop.exists() or (user_cancelled(script) and job.get("JobState") != "RUNNING")  # else it was only a signal
    departed = _departed(attempt, job, script)
    if departed == QUEUED_AGAIN and stepd_above() == 0:  # Slurm gives no reason then
        host = node_name(os.environ)
        message = f"the job script on {host} lost the slurmstepd that had started it, and Slurm requeued the job"
        departed, lost = "", Cause("orphaned", message, node=host, nodes=(host,), retry=True)
    ending = "stopped" if departed or unbegun else lost or _ending(attempt, code, script, requested, cancelled, watch, died)
    if died is not None and not cancelled and not departed and (ending == "stopped" or (
            isinstance(ending, Cause) and KINDS[ending.kind].level >= KINDS["supervisor"].level)):
        ending = died
    signals.close()
    decision = decide(ending, cancelled=cancelled, retries=retries, stalled=stalled_ends(attempt), lacking=lacking(attempt),
                      saved=history.saved_step(run) if isinstance(attempt.spec, JobSpec) else None, returned=_returned(attempt),
                      departed=bool(departed))
    return act(attempt, ending, decision, code, unreached, departed, has_expired(said_in(script)))


def _with_end(attempt: AttemptContext, job: Words) -> AttemptContext:
    """Return the attempt with its job's current end: its time limit may have been changed."""
    end = time_of(job.get("EndTime", "")) if job.get("JobState") == "RUNNING" else None
    return attempt if end is None else replace(attempt, record=replace(attempt.record, end=end))


def _departed(attempt: AttemptContext, job: Words, script: ScriptLog | None) -> str:
    """Return the reason why the job has to leave; empty if it may stay, if one of its nodes failed, or if its run is complete."""
    if attempt.allocation is None or history.complete(attempt.run, attempt.spec) or node_lost(attempt.run, script):
        return ""
    reason = departure(job, attempt.allocation.restart, said_in(script)) or ""
    if reason == QUEUED_AGAIN and stepd_above() != 0:  # Slurm gives no reason if it has lost the node of the job script
        return "" if any(failure.kind == "lost" for failure in read_failures(attempt.run, attempt.record.attempt)) else reason
    return reason


def stalled_ends(attempt: AttemptContext) -> list[history.AttemptEnd]:
    """Return the ends since which the run has made no progress."""
    return history.without_progress(history.history(attempt.run), history.furthest_step(attempt.run, attempt.spec))


def lacking(attempt: AttemptContext) -> str:
    """Return the missing progress in words; empty if a program's progress is unknown."""
    if isinstance(attempt.spec, JobSpec):
        return " without a new checkpoint"
    return " without a later step" if history.furthest_step(attempt.run, attempt.spec) else ""


def _first_code(run: RunDirectory, code: int, stop_requested: bool) -> int:
    """Return the code of the task that ended first; srun's own code, the greatest of the tasks' codes, is less specific.
    ``stop_requested``: True if the ranks were asked to stop; srun may then end with 0 before it has started them."""
    log = run.srun_log
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else ()
    if code == 0 and not stop_requested and gave_up(lines):
        return -signal.SIGKILL
    return code and (first_code(lines) or code)


def _ending(attempt: AttemptContext, code: int, script: ScriptLog | None, stop_requested: bool, cancelled: bool,
            watch: ProgramWatch | ScriptWatch | None, died: Cause | None) -> Ending:
    again = code == 0 and interrupted(attempt)
    finished = code == 0 and not again and (isinstance(attempt.spec, ProgramSpec) or history.complete(attempt.run, attempt.spec))
    failed_node = not finished and not cancelled and node_lost(attempt.run, script)
    if isinstance(attempt.spec, ProgramSpec):
        well = code == 0 and not attempt.by_mpirun  # the silent process is a leftover of a rank
        hang = watch.hang() if watch is not None and not well else None
        unended = watch.unended.hosts if watch is not None and watch.unended is not None else ()
        failed = again or hang is not None or unended or failed_node
        overdue, ranks_asked = (watch.overdue, watch.ranks_asked()) if watch is not None else (False, False)
        ending = None if failed else ending_of(attempt, attempt.spec, code, stop_requested, cancelled, overdue, ranks_asked)
        if ending is None and not failed and attempt.spec.by_script:
            if died is not None:
                return died
            record_failure(attempt, code)
        return ending or _classified(gather(attempt, code, script, hang=hang, unended=unended), code)
    if finished:
        return "completed"
    if code == 0 and not again and not failed_node and (cancelled or stop_requested):  # stopped while srun started its tasks
        return "stopped"
    if (code in (STOPPED, *EARLY) or stop_requested or signalled(attempt, code)) and not (failed_node or attempt.has_failed()):
        return "stopped"
    return _classified(gather(attempt, code or -signal.SIGKILL, script), code)


def _classified(evidence: Evidence, code: int) -> Cause:
    cause = classify(evidence)
    if cause.kind != "unknown" or (code != 0 and not (code == -signal.SIGKILL and gave_up(evidence.srun))):
        return cause
    return Cause("vanished", "Slurm has lost ranks: their step ended with exit code 0 before their work was done", retry=True)


def interrupted(attempt: AttemptContext) -> bool:
    """Return True if Slurm requeued the job although its step succeeded: srun may end with 0 if a node fails while its tasks
    start."""
    allocation = attempt.allocation
    return (allocation is not None and not history.complete(attempt.run, attempt.spec)
            and queued_again(allocation.job_id, allocation.restart, attempt.run.script))


def act(attempt: AttemptContext, ending: Ending, decision: Decision, code: int, unreached: Sequence[str] | None = (),
        departed: str = "", expired: bool = False) -> int:
    """Carry out the decision, and record the action. ``unreached``: nodes that srun could not reach at the end; None if unknown.
    ``departed``: reason why the job had to leave; empty if it could have stayed. ``expired``: True if Slurm ends the job for its
    time limit."""
    if not attempt.is_current():
        return 1
    run, record = attempt.run, attempt.record
    died = ending if isinstance(ending, Cause) else None
    message = died.message if died else f"{ending}: {departed}" if departed else str(ending)
    blamed = _remember(attempt, died) if died is not None else ()
    dead = [finding.node for finding in blamed] if unreached is None else unreached
    refused = None
    if dead and decision.action == "requeue" and attempt.allocation is not None:
        refused = _await_notice(attempt, attempt.allocation, dead, message)
        if run.stop.exists():
            ending, decision = "stopped", replace(decision, action="done", why=STOPPED_BY_USER)
    action, why = _again(attempt, decision, blamed, refused, expired)
    with suppress(OSError):  # a full disk must not change the end of the job
        history.record(run, history.AttemptEnd(
            record.token, record.attempt, history.furthest_step(run, attempt.spec), died.kind if died else str(ending),
            message, died.nodes if died else (), action, time.time(), died.rank if died else None,
            died.node if died else None, _returned(attempt) if died else (), departed))
    attempt.say(f"attempt {record.attempt} {'failed: ' if died else ''}{message.removesuffix('.')}; {why}")
    if action in ("done", "fail"):  # readers that wait for the verdict have the text by then
        conclude_run(attempt, record.attempt, ending, departed)
    if action == "fail":
        return code if 0 < code < 256 else 1
    return 0 if ending == "completed" or action == "requeue" else STOPPED  # jobs that depend on this job see the code


def _again(attempt: AttemptContext, decision: Decision, blamed: Sequence[BadNode], refused: str | None,
           expired: bool) -> tuple[str, str]:
    """Requeue the job if that was decided. Return the action and a sentence about it. ``refused``: reason why it cannot be
    requeued, if known. ``expired``: True if Slurm ends the job for its time limit."""
    allocation, script, why = attempt.allocation, attempt.run.script, decision.why
    if decision.action == "done":
        return "done", why
    if allocation is None:
        return "fail", f"{why}; without Slurm, no scheduler requeues it"
    action: str = decision.action
    if queued_again(allocation.job_id, allocation.restart, script):
        action, why = "requeue", "Slurm has requeued the job"
    elif action == "requeue":
        refused = refused or requeue(allocation.job_id, allocation.restart, script, expired=expired)
        behind = successors(attempt.run, allocation.job_id)
        if refused is not None and behind:
            return "wait", f"not requeued ({refused}); job {behind[0]} continues the run"
        if refused is not None:
            return "fail", f"{why}; not requeued ({refused}); continue with `hpc-mp launch --resume`"
    if action == "requeue":
        why += _left_out(attempt, allocation.job_id, blamed)
        with suppress(CommandFailed):  # then it starts when Slurm's hold ends
            start_soon(allocation.job_id)
    return action, why


def _await_notice(attempt: AttemptContext, job: Allocation, dead: Sequence[str], message: str) -> str | None:
    """Wait until Slurm knows that nodes are dead. Return the reason why the job cannot be requeued afterwards."""
    run, number, end = attempt.run, attempt.record.attempt, attempt.record.end
    needed = notice_s()
    limit = needed if end is None else max(0.0, min(needed, end - time.time() - ENDS_S))
    names = ", ".join(dead)
    if not queued_again(job.job_id, job.restart, run.script):
        waits = f"until it notices that {names} is dead (SlurmdTimeout), at most {limit:.0f} s"
        attempt.say(f"attempt {number} has ended: {message}; {AWAITING} {waits}; a job requeued earlier would never start")
        say_phase(run, number, AWAITING, f"{waits}; then the run continues. {message}")
    if await_notice(job.job_id, job.restart, run.script, dead, limit, lambda: not run.stop.exists()) or limit == needed:
        return None
    return f"its time limit ends before Slurm notices that {names} is dead"


def _left_out(attempt: AttemptContext, job_id: str, blamed: Sequence[BadNode]) -> str:
    """Exclude bad nodes from the requeued job, as far as it can start without them. Return a clause about it."""
    run = attempt.run
    nodes = {finding.node for finding in (*read_exclusions(run.excluded), *blamed)}
    if not nodes:
        return ""
    try:
        keeping, refused = leave_out(run, attempt.spec, job_id, blamed)
    except (CommandFailed, OSError) as denied:
        return f"; {', '.join(sorted(nodes))} could not be excluded ({denied})"
    without = f"; without {', '.join(keeping.nodes)}" if keeping.excluded else ""
    needed = ", ".join(finding.node for finding in keeping.taken_back)
    back = f"; {needed} not excluded, because too few other nodes are left" if needed else ""
    return without + back + (f"; exclusions are not lifted while it waits ({refused})" if refused and keeping.excluded else "")


def _returned(attempt: AttemptContext) -> tuple[str, ...]:
    return history.returned(history.history(attempt.run), attempt.record.hosts)


def conclude_run(supervised: SupervisedRun, attempt: int, ending: Ending, departed: str = "") -> None:
    """Record the verdict on the run, with its report, to be readable without Slurm. Withdraw its queued successors."""
    run, job_id = supervised.run, supervised.job_id
    cause = ending if isinstance(ending, Cause) else Cause("cancelled", departed) if departed else None
    state = "failed" if isinstance(ending, Cause) else ending
    if isinstance(supervised.spec, ProgramSpec):
        say_ended(run, attempt, state)
    conclude(Outcome(run.path, state, job_id, cause=cause, **figures(run, attempt)), attempt)
    if supervised.spec.notify.mail is not None and job_id is not None:
        refused = mail_at_end(job_id, run.script, supervised.spec.notify.mail)
        if refused is not None:
            supervised.say(f"warning: no mail to {supervised.spec.notify.mail}: {refused}")
    withdraw(successors(run, job_id))
    end_watch(run)


def _remember(attempt: AttemptContext, died: Cause) -> tuple[BadNode, ...]:
    """Record the blamed nodes, so that later jobs on this cluster exclude them for a while, and return the findings."""
    if attempt.allocation is None or not died.nodes:
        return ()
    now, kind = time.time(), died.kind
    certainty: Certainty = "certain" if kind in SHOWN_BY_THE_NODE else "likely"
    blamed = tuple(BadNode(node, kind, died.message, str(attempt.run.path), now, now + AVOIDED_S, certainty)
                   for node in died.nodes)
    try:
        record(ledger(attempt.allocation.cluster), blamed)
    except OSError as error:
        attempt.say(f"bad nodes are not recorded for later jobs ({error})")
    return blamed
