"""End a run: ask its ranks to save first, and end it for good when they do not in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from hpc_mp.base.errors import RunFailed
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.submit import cancel
from hpc_mp.launch.status import RunStatus, held, overview, seen
from hpc_mp.rundir import RunDirectory, write_text
from hpc_mp.supervisor.exclusions import end_watch

POLL_S = 0.5  # between two polls of the run directory
KILL_S = 10.0  # until what was killed is gone


def end(run: RunDirectory, now: RunStatus, grace: float, say: Callable[[str], None]) -> RunStatus:
    """Jobs that wait are cancelled, with the run's successors; ranks save at their next step and stop.

    Args:
        now: what the run is doing.
        grace: seconds that they have for it; 0 ends them at once.
        say: called with what is done.

    Raises:
        RunFailed: Slurm refuses, or what runs cannot be ended from here.
        OSError: the run directory cannot be written.
    """
    waiting = [job.id for job in (now.job, *now.successors) if job is not None and job.waits]
    running = now.job if now.job is not None and not now.job.ended and not now.job.waits else None
    if waiting:
        cancel(waiting)
        end_watch(run)
        say(f"cancelled Slurm job{'s' * (len(waiting) > 1)} {', '.join(waiting)}, which had not started")
    if running is None and not held(run):
        return overview(run) if waiting else now
    write_text(run.stop, "hpc-mp cancel\n")  # also what keeps the job from being queued again
    if grace:
        if running is not None:
            with suppress(RunFailed):  # it may have ended just now
                cancel(running.id, "USR2")
        say(f"asked the ranks to save at the next step and to stop; at the latest in {grace:g} s they are ended")
        if (ended := _within(run, running is not None, grace)) is not None:
            return ended
    if running is not None:
        cancel(running.id)
        say(f"ended Slurm job {running.id}")
    else:
        _kill(run)
        say("ended the ranks")
    return _within(run, running is not None, KILL_S) or overview(run)


def _within(run: RunDirectory, slurm: bool, seconds: float) -> RunStatus | None:
    """The overview once the run has ended, or None after so many seconds. Slurm is asked ever more rarely."""
    start = time.monotonic()
    delays = iter(queue.DELAYS_S)
    due = start + next(delays)
    while (now := time.monotonic()) < start + seconds:
        if not slurm and not held(run):
            return seen(run, [])
        if slurm and now > due:
            due = now + next(delays, queue.DELAYS_S[-1])
            found = overview(run)
            if found.job is None or found.job.ended:
                return found
        time.sleep(POLL_S)
    return None


def _kill(run: RunDirectory) -> None:
    """On emulated nodes: the launcher holds the run's lock file open, and so do its ranks, which die with it."""
    holders = sorted(_holders(run.lock), key=lambda process: process.create_time())
    if not holders:
        raise RunFailed(f"{run.path} is held by no process of this machine: cancel it where it was launched")
    for number in (signal.SIGTERM, signal.SIGINT):  # the launcher's second interrupt kills
        with suppress(psutil.NoSuchProcess):
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
