"""The keepers of a run, a job or a launcher: its jobs, the requests to its ranks, its logs.

A run is kept either by a job in Slurm's queue, whose id is in the run directory, or by the launcher that holds it and starts the
ranks itself. A launch that has not submitted its job yet still holds the run.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from hpc_mp.base.errors import RunFailed
from hpc_mp.base.text import several
from hpc_mp.cluster.slurm.job import SlurmJob
from hpc_mp.cluster.slurm.submit import cancel
from hpc_mp.job import ProgramSpec, load_resolved
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.runs import successors
from hpc_mp.runs.lock import held, holder

LiveRuns = Mapping[RunDirectory, SlurmJob | None]
"""Runs whose ranks may live, with their Slurm jobs; None for a run that its launcher holds."""


def job_of(run: RunDirectory) -> str | None:
    """Return the id of the Slurm job that runs it; None if it has no separate job."""
    try:
        return run.job_id.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def job_ids(run: RunDirectory) -> list[str]:
    """Return the Slurm job of a run, then its successors; empty if the run has no job of its own."""
    first = job_of(run)
    return [] if first is None else [first, *(job_id for job_id in successors(run, first) if job_id != first)]


def stop(runs: LiveRuns) -> None:
    """Ask the ranks of runs to save and stop, after ``RunDirectory.stop`` was written, for ranks that look for it.

    Each job gets the signal that its ranks expect; the supervisor must pass it on if srun is not their parent. Launchers of
    programs are interrupted, which do not look for the file. Raises RunFailed if a launcher cannot be reached from here.
    """
    groups: dict[tuple[str, bool], list[str]] = {}
    for run, job in runs.items():
        spec = load_resolved(run.job)
        if job is not None:
            through = isinstance(spec, ProgramSpec) and (spec.by_mpirun or spec.by_script)
            number: str = spec.program.signal if isinstance(spec, ProgramSpec) and not through else "USR2"
            groups.setdefault((number, through), []).append(job.id)
        elif isinstance(spec, ProgramSpec):
            _interrupt(run, (signal.SIGTERM,))
    with suppress(RunFailed):  # the jobs may have ended just now
        for (number, script), ids in groups.items():
            cancel(ids, number, script)


def kill(runs: LiveRuns) -> Iterator[str]:
    """End the ranks of runs at once, and yield messages about it. Raises RunFailed as ``stop``, or if Slurm refuses."""
    if ids := [job.id for job in runs.values() if job is not None]:
        cancel(ids)
        yield f"ended Slurm job{'s' * (len(ids) > 1)} {', '.join(ids)}"
    held_here = [run for run, job in runs.items() if job is None]
    for run in held_here:
        _interrupt(run, (signal.SIGTERM, signal.SIGINT))  # the launcher's second interrupt kills
    if held_here:
        yield f"ended the ranks of {several([run.path.name for run in held_here])}" if len(held_here) > 1 else "ended the ranks"


def script_logs(run: RunDirectory, attempt: RunDirectory) -> list[Path]:
    """Return the logs of an attempt's job scripts; a step of an allocation has one too. All elements of an array write theirs to
    the directory of the first one."""
    job = job_of(run)
    if job is not None and "_" in job:
        return sorted(run.path.parent.glob(f"*/{RunDirectory.slurm_log.name.format(job=job)}"))
    return sorted(attempt.slurm_log.found(), key=lambda path: path.stat().st_mtime)


def _interrupt(run: RunDirectory, numbers: Sequence[signal.Signals]) -> None:
    """Send signals to the launcher, with which its ranks die. No signal is sent once the run has ended: the launcher may already
    be at the next run of a sweep. Raises RunFailed if the launcher does not run on this host."""
    launcher = holder(run)
    process = launcher.process() if launcher is not None else None
    if process is None and held(run):
        where = f"process {launcher.pid} on {launcher.host}" if launcher is not None else "an unknown process"
        raise RunFailed(f"{run.path} is held by {where}, which cannot be reached from here: cancel it where it was launched")
    for number in numbers:
        with suppress(psutil.NoSuchProcess):
            if process is not None and held(run):
                process.send_signal(number)
