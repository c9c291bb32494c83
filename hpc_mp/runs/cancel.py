"""Cancellation of runs: their ranks are asked to save first, and killed if they do not end in time."""

import time
from collections.abc import Callable, Iterator, Mapping

from hpc_mp.base.errors import RunFailed
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.jobs import COMPLETING
from hpc_mp.cluster.slurm.submit import cancel
from hpc_mp.job import ProgramSpec, load_resolved
from hpc_mp.rundir import RunDirectory, write_text
from hpc_mp.runs.keepers import Keeper, LiveRuns, reaching
from hpc_mp.runs.lock import held
from hpc_mp.runs.status import RunStatus, described, overviews, seen
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
    live = {run: job for run, job in jobs.items() if job is not None or held(run)}
    for run in live:
        write_text(run.stop, "hpc-mp cancel\n")  # also keeps the job from being requeued
    ended: dict[RunDirectory, RunStatus] = {}
    if grace and live:
        for back_end, own in _by_back_end(live):
            back_end.stop(own)
        programs = all(isinstance(load_resolved(run.job), ProgramSpec) for run in live)
        message = "sent the ranks program.signal" if programs else "asked the ranks to save at the next step and to stop"
        say(f"{message}; at the latest in {grace:g} s they are ended")
        ended = _within(live, grace)
    if late := {run: job for run, job in live.items() if run not in ended}:
        for back_end, own in _by_back_end(late):
            say(back_end.kill(own))
        ended |= _within(late, KILL_S)
    remaining = [run for run in runs if run not in ended]
    changed = [run for run in remaining if run in live or (waiting and not runs[run].ended)]
    return dict(runs) | ended | dict(zip(changed, overviews(changed), strict=True))


def _by_back_end(runs: LiveRuns) -> Iterator[tuple[Keeper, LiveRuns]]:
    for back_end in dict.fromkeys(reaching(run, job) for run, job in runs.items()):
        yield back_end, {run: job for run, job in runs.items() if reaching(run, job) is back_end}


def _within(runs: LiveRuns, seconds: float) -> dict[RunDirectory, RunStatus]:
    """Return the runs that end within ``seconds``, with their final state. Slurm is asked at growing intervals."""
    start = time.monotonic()
    delays = iter(queue.DELAYS_S)
    due = start + next(delays)
    ended: dict[RunDirectory, RunStatus] = {}
    while (now := time.monotonic()) < start + seconds and len(ended) < len(runs):
        ended |= {run: seen(run, []) for run, job in runs.items() if run not in ended and job is None and not held(run)}
        if now > due:
            due = now + next(delays, queue.DELAYS_S[-1])
            remaining = [run for run, job in runs.items() if run not in ended and job is not None]
            statuses = {run: seen(run, jobs) for run, jobs in zip(remaining, described(remaining), strict=True)}
            ended |= {run: status for run, status in statuses.items()
                      if status.job is None or status.job.ended or (status.ended and status.job.state == COMPLETING)}
        if len(ended) < len(runs):
            time.sleep(POLL_S)
    return ended
