"""Recovery after the death of a supervisor: the job script, which outlives it, lets the run continue.

The supervisor may be killed, for example by the kernel if memory is exhausted: before the ranks start, while they run, or while
it records their end. The ranks keep running: they are asked to save and stop, and the end of the attempt is completed here.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpc_mp.base.exit_codes import ending
from hpc_mp.cluster.slurm.allocation import Allocation, allocation
from hpc_mp.cluster.slurm.requeue import queued_again
from hpc_mp.diagnosis.lines import ended_there, first_code
from hpc_mp.job import ProgramSpec, load_resolved
from hpc_mp.layout.placement import from_dict
from hpc_mp.rundir import TOKEN, AttemptRecord, RunDirectory, history, read_attempt, read_json
from hpc_mp.rundir.outcome import STOPPED, Cause
from hpc_mp.supervisor.attempt import has_failed, watch_of
from hpc_mp.supervisor.context import AttemptContext, SupervisedRun
from hpc_mp.supervisor.ending import Ending, conclude_run, finish
from hpc_mp.supervisor.gather import script_log
from hpc_mp.supervisor.prepare import begin
from hpc_mp.supervisor.script import ScriptWatch, script_code
from hpc_mp.supervisor.signals import Signals
from hpc_mp.supervisor.srun import follow_step, orphans
from hpc_mp.supervisor.unended import LAUNCHING


def go_on_after(code: int, path: Path, command: Sequence[str], signals: Signals) -> int:
    """Do the remaining work of a supervisor that ended with ``code``, and return the exit code of the job. Raises HpcMpError and
    OSError as ``attempt.start`` does."""
    run = RunDirectory(path)
    job, script = allocation(os.environ), script_log()
    record = _record(run, job)
    ended = next((end for end in history.history(run) if record is not None and end.token == record.token), None)
    killed = code > 128
    if job is None or (ended is None and not killed and (record is None or code in (2, STOPPED))):
        return code  # it has reported the reason itself
    supervised = SupervisedRun(run, load_resolved(run.job), from_dict(read_json(run.placement)), job, command)
    if ended is not None:
        if ended.action in ("done", "fail") and not run.outcome.exists():
            conclude_run(supervised, ended.attempt, _ending(ended))
        return 0 if ended.action == "requeue" or ended.kind == "completed" else code
    if record is None:
        if queued_again(job.job_id, job.restart, run.script):
            return code
        attempt = begin(supervised)
    else:
        attempt = AttemptContext(run, supervised.spec, supervised.placement, job, command, record=record, host_order="")
    host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    message = f"the supervisor on {host} {ending(128 - code if killed else code)}"
    resumes = not isinstance(attempt.spec, ProgramSpec) or attempt.spec.program.resumes
    follows = "save and stop, and the run continues" if resumes else "run to their end"  # other programs would start over
    attempt.say(f"attempt {attempt.record.attempt}: {message}; its ranks {follows}")
    died = Cause("supervisor", message, None, host, time=time.time(), retry=True)
    if resumes:
        signals.stop_requested, signals.number = True, signal.SIGUSR2
    watch = watch_of(attempt, signals)
    if isinstance(watch, ScriptWatch):
        if (script_step := watch.take_over()) is not None:
            follow_step(script_step, signals, watch.poll)
        ended_with = script_code(run)
        return finish(attempt, 1 if ended_with is None else ended_with, script, signals, watch,
                      died=died if ended_with is None else None)
    ran = False
    for step in orphans(TOKEN, attempt.record.token):
        follow_step(step, signals, has_failed(attempt, watch))
        ran = ran or step.argv[-2:] == list(command[-2:])
    return finish(attempt, int(not _all_is_done(attempt, ran)), script, signals, watch, died=died)


def _ending(ended: history.AttemptEnd) -> Ending:
    if ended.action == "done":
        return "completed" if ended.kind == "completed" else "stopped"
    return Cause(ended.kind, ended.message, ended.rank, ended.node, time=ended.time)


def _record(run: RunDirectory, job: Allocation | None) -> AttemptRecord | None:
    """Return the attempt record of this start; None if the supervisor has not written it."""
    with suppress(OSError, ValueError):
        record = read_attempt(run.attempt_record)
        return record if job is not None and record.token.startswith(f"{job.job_id}.{job.restart}.") else None
    return None


def _all_is_done(attempt: AttemptContext, ran: bool) -> bool:
    """Return True if training is complete, or if srun reported that all tasks of a program ended successfully. ``ran``: True if
    the tasks ran after the supervisor's death; else srun's messages may concern an earlier step."""
    spec, log = attempt.spec, attempt.run.srun_log
    if not isinstance(spec, ProgramSpec):
        return history.complete(attempt.run, spec)
    lines = log.read_text(encoding="utf-8", errors="replace").rpartition(LAUNCHING)[2].splitlines() if ran else []
    tasks = {task for end in map(ended_there, lines) if end is not None for task in end[1]}
    return first_code(lines) is None and len(tasks) == spec.srun_tasks_per_node * spec.job.nodes
