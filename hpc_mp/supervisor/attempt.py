"""One start of a run, from its beginning to what follows from its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Literal

from hpc_mp.cluster.bad_nodes import BadNode, ledger, record
from hpc_mp.cluster.slurm.allocation import Allocation, allocation
from hpc_mp.cluster.slurm.requeue import exclude, queued_again, requeue
from hpc_mp.cluster.slurm.submit import withdraw
from hpc_mp.job import JobSpec, load_job
from hpc_mp.layout.placement import from_dict
from hpc_mp.report.conclude import conclude
from hpc_mp.rundir import TOKEN, AttemptRecord, LineFile, RunDirectory, history, read_attempt, read_json
from hpc_mp.rundir.job_chain import successors
from hpc_mp.rundir.outcome import STOPPED, Cause, Outcome, figures
from hpc_mp.supervisor import node_setup as node_steps
from hpc_mp.supervisor.diagnose import RootCause, classify, gather
from hpc_mp.supervisor.evidence import ScriptLog, script_log, user_cancelled
from hpc_mp.supervisor.log_patterns import first_code
from hpc_mp.supervisor.prepare import begin
from hpc_mp.supervisor.profile import apply_profile
from hpc_mp.supervisor.restart_policy import Decision, decide
from hpc_mp.supervisor.signals import Signals
from hpc_mp.supervisor.srun import follow

AVOIDED_S = 24 * 3600.0  # how long a node that failed is left out
EARLY = tuple(code for number in (signal.SIGUSR2, signal.SIGTERM)  # a task was asked to stop before it could listen
              for code in (-number, 128 + number))


def start(path: Path, command: Sequence[str], signals: Signals) -> int:
    """Start the ranks with ``command``, follow them to their end, and do what follows from it.

    Returns the exit code of the job. Raises HpcMpError and OSError for a run directory or an allocation without use.
    """
    run = RunDirectory(path)
    spec, placement = load_job(run.job), from_dict(read_json(run.placement))
    given, script = allocation(os.environ), script_log()
    if run.stop.exists() or history.complete(run, spec.train.steps):
        return _nothing_to_do(run, given)
    attempt, why = begin(run, spec, placement, given, srun=command)
    run.outcome.unlink(missing_ok=True)
    hosts = ", ".join(attempt.hosts) or "the hosts of mpirun"
    _say(run, f"start {attempt.attempt} ({attempt.token}) on {hosts}; {why}")
    stalled = _stalled(run)
    if sum(end.kind != "stopped" for end in stalled) > spec.slurm.retries:  # Slurm asks nobody when it queues a job again
        last = next(end for end in stalled if end.kind != "stopped")
        said = f"{last.message}; {len(stalled)} attempts without a new checkpoint"
        died = RootCause(Cause(last.kind, said, last.rank, last.node, time=last.time), (), retry=False)
        return _act(run, spec, attempt, given, died, Decision("fail", (), f"slurm.retries = {spec.slurm.retries}"), 1)

    environ = os.environ | {TOKEN: attempt.token, "MASTER_ADDR": attempt.address,
                            "MASTER_PORT": str(attempt.port)}
    if given is not None:  # elsewhere profiles have no effect, and launch has said so
        command, environ, profiled = apply_profile(run, spec, command, environ)
        if profiled is not None:
            _say(run, profiled)
    code = node_steps.start(run, spec, command, environ, signals)
    if code == 0 and signals.asked:
        code = STOPPED
    if code == 0:
        code = follow(command, environ, run.srun_log, signals, lambda: _failed(run, attempt)).code
    if not _current(run, attempt):
        return 1
    code = _telling(run, code)
    node_steps.end(run, spec, command, environ, failed=code not in (0, STOPPED))
    ending = _ending(run, attempt, given, code, script, signals.asked)

    signals.close()
    cancelled = run.stop.exists() or user_cancelled(script)
    decision = decide(ending, cancelled=cancelled, retries=spec.slurm.retries, stalled=_stalled(run))
    return _act(run, spec, attempt, given, ending, decision, code)


def _nothing_to_do(run: RunDirectory, given: Allocation | None) -> int:
    """For a job of a chain, or one that was stopped while it waited."""
    told = run.stop.exists()
    _say(run, f"nothing to do: the run {'was told to stop' if told else 'is complete'}")
    _conclude(run, run.attempt(), given, "stopped" if told else "completed")
    withdraw(successors(run, given.job_id if given else None))
    return 0


def _stalled(run: RunDirectory) -> list[history.AttemptEnd]:
    """Ends since which no checkpoint has come."""
    return history.without_progress(history.history(run), history.saved_step(run))


def _current(run: RunDirectory, attempt: AttemptRecord) -> bool:
    """Whether no later start has begun: this one may live on after Slurm thought its node dead. Then it touches nothing."""
    if read_attempt(run.attempt_record).token == attempt.token:
        return True
    print(f"hpc-mp: start {attempt.attempt} ({attempt.token}) is not the run's current one any more", flush=True)
    return False


def _failed(run: RunDirectory, attempt: AttemptRecord) -> bool:
    return bool(run.failure.found(attempt.attempt))


def _telling(run: RunDirectory, code: int) -> int:
    """srun's code is the greatest of all tasks': what the first task ended with tells more."""
    log = run.srun_log
    said = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else ()
    return code and (first_code(said) or code)


def _ending(
    run: RunDirectory, attempt: AttemptRecord, given: Allocation | None, code: int, script: ScriptLog | None,
    asked: bool,
) -> Literal["completed", "stopped"] | RootCause:
    if code == 0:
        return "completed"
    if (code in (STOPPED, *EARLY) or asked) and not _failed(run, attempt):
        return "stopped"
    return classify(gather(run, attempt.attempt, given.job_id if given else None, code, script))


def _act(
    run: RunDirectory, spec: JobSpec, attempt: AttemptRecord, given: Allocation | None,
    ending: Literal["completed", "stopped"] | RootCause, decision: Decision, code: int,
) -> int:
    """Carry the decision out, and write down what was done."""
    if not _current(run, attempt):
        return 1
    died = ending if isinstance(ending, RootCause) else None
    message = died.cause.message if died else str(ending)
    if died is not None and died.nodes_to_blame and given is not None:
        _remember(run, given.cluster, died)
    if decision.action == "done":
        action, why = "done", decision.why
    elif given is None:
        action, why = "fail", f"{decision.why}; outside of Slurm nothing queues it again"
    else:
        action, why = _again(run, spec, given, decision)
    with suppress(OSError):  # a full disk must not change what the job's end is
        history.record(run, history.AttemptEnd(
            attempt.token, attempt.attempt, history.saved_step(run), died.cause.kind if died else str(ending), message,
            died.nodes_to_blame if died else (), action, time.time(), died.cause.rank if died else None,
            died.cause.node if died else None))
    if action in ("done", "fail"):
        _conclude(run, attempt.attempt, given, ending)
        withdraw(successors(run, given.job_id if given else None))
    _say(run, f"start {attempt.attempt} {'failed: ' if died else ''}{message}; {why}")
    if action != "fail":
        return 0
    return code if 0 < code < 256 else 1


def _again(run: RunDirectory, spec: JobSpec, given: Allocation, decision: Decision) -> tuple[str, str]:
    """Have the job queued again if that was decided; what was done, and a sentence about it."""
    action: str = decision.action
    why = decision.why
    if queued_again(given.job_id, given.restart, run.script):
        action, why = "requeue", "Slurm has queued the job again"
    elif action == "requeue":
        refused = requeue(given.job_id, given.restart, run.script)
        behind = successors(run, given.job_id)
        if refused is not None and behind:
            return "wait", f"not queued again ({refused}); job {behind[0]} goes on"
        if refused is not None:
            return "fail", f"not queued again ({refused}); `hpc-mp launch --resume` goes on"
    if action == "requeue" and decision.exclude:
        unheard = exclude(given.job_id, decision.exclude, spec.job.nodes)
        nodes = ", ".join(decision.exclude)
        why += f"; without {nodes}" if unheard is None else f"; {nodes} could not be left out ({unheard})"
    return action, why


def _conclude(
    run: RunDirectory, attempt: int, given: Allocation | None, ending: Literal["completed", "stopped"] | RootCause,
) -> None:
    """The verdict on the whole run, with its report, for whoever asks without Slurm."""
    outcome = Outcome(run.path, "failed" if isinstance(ending, RootCause) else ending, given.job_id if given else None,
                      cause=ending.cause if isinstance(ending, RootCause) else None, **figures(run, attempt))
    conclude(outcome, attempt)


def _remember(run: RunDirectory, cluster: str, died: RootCause) -> None:
    now = time.time()
    findings = [BadNode(node, died.cause.kind, died.cause.message, str(run.path), now, now + AVOIDED_S)
                for node in died.nodes_to_blame]
    try:
        record(ledger(cluster), findings)
    except OSError as error:
        _say(run, f"bad nodes are not remembered beyond this job ({error})")


def _say(run: RunDirectory, text: str) -> None:
    line = f"{datetime.now():%H:%M:%S} {text}"
    with suppress(OSError):
        print(f"hpc-mp: {line}", flush=True)
    main = LineFile(run.main_log)
    main.write(line)
    main.close()
