"""One attempt of a run, from its start to the end of its ranks."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hpc_mp.base.exit_codes import ending as how_it_ended
from hpc_mp.cluster.slurm.allocation import allocation
from hpc_mp.cluster.slurm.requeue import is_own, known_job
from hpc_mp.job import ProgramSpec, load_resolved
from hpc_mp.layout.placement import from_dict
from hpc_mp.program.guard import first_code as first_code_of_ranks
from hpc_mp.rundir import RunDirectory, history, read_json
from hpc_mp.rundir.outcome import STOPPED, Cause
from hpc_mp.rundir.rank_env import node_name
from hpc_mp.supervisor import node_setup
from hpc_mp.supervisor.context import AttemptContext, SupervisedRun
from hpc_mp.supervisor.ending import act, conclude_run, finish, lacking, stalled_ends
from hpc_mp.supervisor.exclusions import watch_running
from hpc_mp.supervisor.gather import script_log
from hpc_mp.supervisor.in_container import write_program_script
from hpc_mp.supervisor.prepare import apply_profile, begin
from hpc_mp.supervisor.program import ProgramWatch
from hpc_mp.supervisor.restart_policy import Decision
from hpc_mp.supervisor.script import ScriptWatch
from hpc_mp.supervisor.signals import Signals
from hpc_mp.supervisor.srun import end_steps, follow, follow_step


def start(path: Path, command: Sequence[str], signals: Signals) -> int:
    """Start the ranks with ``command``, follow them to their end, and act on it. Returns the exit code of the job. Raises
    HpcMpError and OSError for an unusable run directory or allocation."""
    run = RunDirectory(path)
    waiting = SupervisedRun(run, load_resolved(run.job), from_dict(read_json(run.placement)), allocation(os.environ), command)
    script = script_log()
    if run.stop.exists() or history.complete(run, waiting.spec):
        return _nothing_to_do(waiting)
    attempt = begin(waiting, script=script)
    run.outcome.unlink(missing_ok=True)
    hosts = ", ".join(attempt.record.hosts) or "the hosts of its launcher"
    attempt.say(f"attempt {attempt.record.attempt} (token {attempt.record.token}) on {hosts}; {attempt.host_order}")
    retries, stalled = attempt.spec.slurm.retries, stalled_ends(attempt)
    if sum(end.counts for end in stalled) > retries:  # Slurm does not ask before it requeues a job
        last = next(end for end in stalled if end.counts)
        message = f"{last.message}; {len(stalled)} attempts{lacking(attempt)}"
        died = Cause(last.kind, message, last.rank, last.node, time=last.time)
        return act(attempt, died, Decision("fail", f"slurm.retries = {retries}"), 1)

    if attempt.allocation is not None:
        unwatched = watch_running(run, attempt.spec, attempt.record.hosts)
        if unwatched is not None:
            attempt.say(f"if the first node dies, excluded nodes stay excluded ({unwatched})")
    if attempt.allocation is not None:  # without Slurm, profiles have no effect, and launch has reported it
        command, base, profiled = apply_profile(run, attempt.spec, command, os.environ)
        attempt = replace(attempt, command=command, base_environ=base)
        if profiled is not None:
            attempt.say(profiled)
        if isinstance(attempt.spec, ProgramSpec) and attempt.spec.slurm.container is not None:
            write_program_script(attempt, attempt.spec, os.environ)
    code = node_setup.start(attempt, signals)
    watch = None
    lost: Cause | None = None
    if code == 0:
        watch = watch_of(attempt, signals, begins=True)
        alone = attempt.allocation is None
        if isinstance(watch, ScriptWatch):
            end = follow_step(watch.start(), signals, watch.poll)
        else:
            end = follow(command, attempt.environ, run.srun_log, signals, has_failed(attempt, watch), mpirun=alone)
            lost = _without_srun(attempt, end.code) if end.died and not alone else None
        code = (alone and first_code_of_ranks(run.guards)) or (0 if end.blind else end.code)
    return finish(attempt, code, script, signals, watch, lost=lost)


def watch_of(attempt: AttemptContext, signals: Signals, begins: bool = False) -> ProgramWatch | ScriptWatch | None:
    """Return the watch over the ranks of a program, or over a script, which also warns them; None for our own engine. ``begins``:
    True if the ranks are started now."""
    if not isinstance(attempt.spec, ProgramSpec):
        return None
    watch = ScriptWatch(attempt, attempt.spec) if attempt.spec.by_script else ProgramWatch(attempt, attempt.spec, begins)
    if attempt.allocation is not None:  # mpirun forwards the signals that it gets
        signals.warn = partial(watch.warn, signals)
    return watch


def has_failed(attempt: AttemptContext, watch: ProgramWatch | ScriptWatch | None) -> Callable[[], bool]:
    """Return a test for a failed rank or a hang of all ranks; ranks of our own engine notice a hang themselves."""
    return attempt.has_failed if watch is None else lambda: attempt.has_failed() or watch.poll()


def _without_srun(attempt: AttemptContext, code: int) -> Cause:
    """Return the death of srun as the cause. Ranks that still run save before their nodes are cleaned up."""
    host, job = node_name(os.environ), attempt.allocation
    if job is not None and is_own(known_job(job.job_id), job.job_id, attempt.run.script):
        end_steps(job.job_id, attempt.record.grace)
    message = f"the srun process on {host}, which had started the ranks, {how_it_ended(code)}"
    return Cause("signal", message, node=host, retry=True)


def _nothing_to_do(waiting: SupervisedRun) -> int:
    """Conclude a job of a chain without remaining work, or a job that was stopped while it waited."""
    stopped = waiting.run.stop.exists()
    waiting.run.batch_environ.unlink(missing_ok=True)
    waiting.say(f"nothing to do: the run {'was stopped' if stopped else 'is complete'}")
    conclude_run(waiting, waiting.run.attempt(), "stopped" if stopped else "completed")
    return STOPPED if stopped else 0
