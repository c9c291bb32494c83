"""Cancellation of runs: their ranks are asked to save first, and killed if they do not end in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from hpc_mp.base.errors import RunFailed
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.job import COMPLETING, SlurmJob
from hpc_mp.cluster.slurm.submit import cancel
from hpc_mp.job import ProgramSpec, load_any
from hpc_mp.launch.status import RunStatus, held, job_ids, overviews, seen
from hpc_mp.rundir import RunDirectory, write_text
from hpc_mp.supervisor.exclusions import end_watch

POLL_S = 0.5  # between two polls of the run directory
KILL_S = 10.0  # until killed processes are gone


def end(runs: Mapping[RunDirectory, RunStatus], grace: float, say: Callable[[str], None]) -> dict[RunDirectory, RunStatus]:
    """Cancel waiting jobs, with the runs' successors, and have ranks save at their next step and stop. All runs are asked
    before any is waited for.

    Args:
        runs: the runs with their current state.
        grace: seconds that ranks have to save; 0 kills them at once.
        say: called with a text about each action.

    Returns:
        The state of each run afterwards.

    Raises:
        RunFailed: Slurm refuses, or the runs cannot be ended from here.
        OSError: a run directory cannot be written.
    """
    if silent := [status.job for status in runs.values() if status.state == "unknown" and status.job is not None]:
        cause = f" ({silent[0].reason})" if silent[0].reason else ""
        names = ", ".join(job.id for job in silent)
        raise RunFailed(f"Slurm does not answer{cause}, and it alone can end job {names}: try again when `scontrol ping` answers")
    waiting = [job.id for status in runs.values() for job in (status.job, *status.successors) if job is not None and job.waits]
    if waiting:
        cancel(waiting)
        for run, status in runs.items():
            end_watch(run)
            if status.job is not None and status.job.waits:
                write_text(run.stop, "hpc-mp cancel\n")
        say(f"cancelled Slurm job{'s' * (len(waiting) > 1)} {', '.join(waiting)}, which had not started")
    jobs = {run: status.job if status.job is not None and not status.job.ended and not status.job.waits else None
            for run, status in runs.items()}
    live = [run for run, job in jobs.items() if job is not None or held(run)]
    for run in live:
        write_text(run.stop, "hpc-mp cancel\n")  # also keeps the job from being requeued
    running = [job.id for job in jobs.values() if job is not None]
    ended: dict[RunDirectory, RunStatus] = {}
    if grace and live:
        if running:
            with suppress(RunFailed):  # the jobs may have ended just now
                for (number, script), ids in _by_signal(live, jobs).items():
                    cancel(ids, number, script)
        for run in live:
            if jobs[run] is None and isinstance(load_any(run.job), ProgramSpec):  # programs do not look for our ranks' stop file
                _interrupt(run, (signal.SIGTERM,))
        programs = all(isinstance(load_any(run.job), ProgramSpec) for run in live)
        message = "sent the ranks program.signal" if programs else "asked the ranks to save at the next step and to stop"
        say(f"{message}; at the latest in {grace:g} s they are ended")
        ended = _within(live, jobs, grace)
    if late := [run for run in live if run not in ended]:
        _kill(late, jobs, say)
        ended |= _within(late, jobs, KILL_S)
    remaining = [run for run in runs if run not in ended]
    changed = [run for run in remaining if run in live or (waiting and not runs[run].ended)]
    return dict(runs) | ended | dict(zip(changed, overviews(changed), strict=True))


def _within(runs: Collection[RunDirectory], jobs: Mapping[RunDirectory, SlurmJob | None],
            seconds: float) -> dict[RunDirectory, RunStatus]:
    """Return the runs that end within ``seconds``, with their final state. Slurm is asked at growing intervals."""
    start = time.monotonic()
    delays = iter(queue.DELAYS_S)
    due = start + next(delays)
    ended: dict[RunDirectory, RunStatus] = {}
    while (now := time.monotonic()) < start + seconds and len(ended) < len(runs):
        local = [run for run in runs if run not in ended and jobs[run] is None]
        ended |= {run: seen(run, []) for run in local if not held(run)}
        if now > due:
            due = now + next(delays, queue.DELAYS_S[-1])
            remaining = [run for run in runs if run not in ended and jobs[run] is not None]
            states = queue.job_states([job_id for run in remaining for job_id in job_ids(run)]) if remaining else {}
            statuses = [seen(run, [states[job_id] for job_id in job_ids(run)]) for run in remaining]
            ended |= {run: status for run, status in zip(remaining, statuses, strict=True)
                      if status.job is None or status.job.ended or (status.ended and status.job.state == COMPLETING)}
        if len(ended) < len(runs):
            time.sleep(POLL_S)
    return ended


def _by_signal(runs: Sequence[RunDirectory], jobs: Mapping[RunDirectory, SlurmJob | None]) -> dict[tuple[str, bool], list[str]]:
    """Group the jobs by the signal that asks their ranks to stop, and by whether the job script must forward it."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for run in runs:
        if (job := jobs[run]) is not None:
            spec = load_any(run.job)
            through = isinstance(spec, ProgramSpec) and (spec.by_mpirun or spec.by_script)  # the supervisor passes it on
            number = spec.program.signal if isinstance(spec, ProgramSpec) and not through else "USR2"
            groups.setdefault((number, through), []).append(job.id)
    return groups


def _kill(runs: Sequence[RunDirectory], jobs: Mapping[RunDirectory, SlurmJob | None], say: Callable[[str], None]) -> None:
    if ids := [job.id for run in runs if (job := jobs[run]) is not None]:
        cancel(ids)
        say(f"ended Slurm job{'s' * (len(ids) > 1)} {', '.join(ids)}")
    for run in runs:
        if jobs[run] is None:
            _interrupt(run, (signal.SIGTERM, signal.SIGINT))  # the launcher's second interrupt kills
            say("ended the ranks")


def _interrupt(run: RunDirectory, numbers: Sequence[signal.Signals]) -> None:
    """Send signals to the launcher of ranks on this machine. It holds the run's lock file open, as do its ranks, which die with
    it.

    No signal is sent once the run has ended: its launcher may already be at the next run of a sweep.

    Raises:
        RunFailed: the launcher runs on another machine.
    """
    holders = sorted(_holders(run.lock), key=lambda process: process.create_time())
    if not holders and held(run):
        raise RunFailed(f"{run.path} is held by no process of this machine: cancel it where it was launched")
    for number in numbers:
        with suppress(psutil.NoSuchProcess):
            if held(run):
                holders[0].send_signal(number)


def _holders(lock: Path) -> list[psutil.Process]:
    """Return the processes that have the file open."""
    holders = []
    identity = os.stat(lock)
    for process in psutil.process_iter():
        with suppress(OSError):
            if any(os.path.samestat(os.stat(link), identity) for link in Path(f"/proc/{process.pid}/fd").iterdir()
                   if os.readlink(link) == str(lock)):
                holders.append(process)
    return holders
