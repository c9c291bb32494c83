"""End runs: ask their ranks to save first, and end them for good when they do not in time."""

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
KILL_S = 10.0  # until what was killed is gone


def end(runs: Mapping[RunDirectory, RunStatus], grace: float, say: Callable[[str], None]) -> dict[RunDirectory, RunStatus]:
    """Jobs that wait are cancelled, with the runs' successors; ranks save at their next step and stop. All runs are asked before
    any is waited for.

    Args:
        runs: with what each is doing.
        grace: seconds that they have for it; 0 ends them at once.
        say: called with what is done.

    Returns:
        What each does then.

    Raises:
        RunFailed: Slurm refuses, or what runs cannot be ended from here.
        OSError: a run directory cannot be written.
    """
    if silent := [now.job for now in runs.values() if now.state == "unknown" and now.job is not None]:
        why = f" ({silent[0].reason})" if silent[0].reason else ""
        names = ", ".join(job.id for job in silent)
        raise RunFailed(f"Slurm does not answer{why}, and it alone can end job {names}: try again when `scontrol ping` answers")
    waiting = [job.id for now in runs.values() for job in (now.job, *now.successors) if job is not None and job.waits]
    if waiting:
        cancel(waiting)
        for run, now in runs.items():
            end_watch(run)
            if now.job is not None and now.job.waits:
                write_text(run.stop, "hpc-mp cancel\n")
        say(f"cancelled Slurm job{'s' * (len(waiting) > 1)} {', '.join(waiting)}, which had not started")
    jobs = {run: now.job if now.job is not None and not now.job.ended and not now.job.waits else None
            for run, now in runs.items()}
    live = [run for run, job in jobs.items() if job is not None or held(run)]
    for run in live:
        write_text(run.stop, "hpc-mp cancel\n")  # also what keeps the job from being queued again
    running = [job.id for job in jobs.values() if job is not None]
    ended: dict[RunDirectory, RunStatus] = {}
    if grace and live:
        if running:
            with suppress(RunFailed):  # they may have ended just now
                for (number, script), ids in _by_signal(live, jobs).items():
                    cancel(ids, number, script)
        for run in live:
            if jobs[run] is None and isinstance(load_any(run.job), ProgramSpec):  # no program looks for the file of our ranks
                _interrupt(run, (signal.SIGTERM,))
        programs = all(isinstance(load_any(run.job), ProgramSpec) for run in live)
        asked = "sent the ranks program.signal" if programs else "asked the ranks to save at the next step and to stop"
        say(f"{asked}; at the latest in {grace:g} s they are ended")
        ended = _within(live, jobs, grace)
    if late := [run for run in live if run not in ended]:
        _kill(late, jobs, say)
        ended |= _within(late, jobs, KILL_S)
    left = [run for run in runs if run not in ended]
    changed = [run for run in left if run in live or (waiting and not runs[run].ended)]
    return dict(runs) | ended | dict(zip(changed, overviews(changed), strict=True))


def _within(runs: Collection[RunDirectory], jobs: Mapping[RunDirectory, SlurmJob | None],
            seconds: float) -> dict[RunDirectory, RunStatus]:
    """Those that end within so many seconds, with what they have come to. Slurm is asked ever more rarely."""
    start = time.monotonic()
    delays = iter(queue.DELAYS_S)
    due = start + next(delays)
    ended: dict[RunDirectory, RunStatus] = {}
    while (now := time.monotonic()) < start + seconds and len(ended) < len(runs):
        local = [run for run in runs if run not in ended and jobs[run] is None]
        ended |= {run: seen(run, []) for run in local if not held(run)}
        if now > due:
            due = now + next(delays, queue.DELAYS_S[-1])
            left = [run for run in runs if run not in ended and jobs[run] is not None]
            states = queue.job_states([job_id for run in left for job_id in job_ids(run)]) if left else {}
            found = [seen(run, [states[job_id] for job_id in job_ids(run)]) for run in left]
            ended |= {run: each for run, each in zip(left, found, strict=True)
                      if each.job is None or each.job.ended or (each.ended and each.job.state == COMPLETING)}
        if len(ended) < len(runs):
            time.sleep(POLL_S)
    return ended


def _by_signal(runs: Sequence[RunDirectory], jobs: Mapping[RunDirectory, SlurmJob | None]) -> dict[tuple[str, bool], list[str]]:
    """The signal that tells ranks to stop, whether the job's script is to tell them, and the jobs whose ranks it tells."""
    found: dict[tuple[str, bool], list[str]] = {}
    for run in runs:
        if (job := jobs[run]) is not None:
            spec = load_any(run.job)
            by_script = isinstance(spec, ProgramSpec) and spec.by_mpirun
            number = spec.program.signal if isinstance(spec, ProgramSpec) and not by_script else "USR2"
            found.setdefault((number, by_script), []).append(job.id)
    return found


def _kill(runs: Sequence[RunDirectory], jobs: Mapping[RunDirectory, SlurmJob | None], say: Callable[[str], None]) -> None:
    if ids := [job.id for run in runs if (job := jobs[run]) is not None]:
        cancel(ids)
        say(f"ended Slurm job{'s' * (len(ids) > 1)} {', '.join(ids)}")
    for run in runs:
        if jobs[run] is None:
            _interrupt(run, (signal.SIGTERM, signal.SIGINT))  # the launcher's second interrupt kills
            say("ended the ranks")


def _interrupt(run: RunDirectory, numbers: Sequence[signal.Signals]) -> None:
    """Send these to the launcher of ranks on this machine: it holds the run's lock file open, as its ranks do, which die with it.

    Once the run has ended nothing is sent: its launcher may be at the next run of a sweep.

    Raises:
        RunFailed: it runs on another machine.
    """
    holders = sorted(_holders(run.lock), key=lambda process: process.create_time())
    if not holders and held(run):
        raise RunFailed(f"{run.path} is held by no process of this machine: cancel it where it was launched")
    for number in numbers:
        with suppress(psutil.NoSuchProcess):
            if held(run):
                holders[0].send_signal(number)


def _holders(lock: Path) -> list[psutil.Process]:
    """The processes that have the file open."""
    found = []
    wanted = os.stat(lock)
    for process in psutil.process_iter():
        with suppress(OSError):
            if any(os.path.samestat(os.stat(link), wanted) for link in Path(f"/proc/{process.pid}/fd").iterdir()
                   if os.readlink(link) == str(lock)):
                found.append(process)
    return found
