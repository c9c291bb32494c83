"""Back ends for the runs that they have started: the jobs of a run, the requests to its ranks, its logs.

The launch writes the name of the back end into ``plan.json``. Two kinds exist: a run in Slurm's queue, and a run held by its
launcher, which starts the ranks itself.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpc_mp.base.errors import RunFailed
from hpc_mp.base.text import several
from hpc_mp.cluster.slurm.jobs import SlurmJob
from hpc_mp.cluster.slurm.submit import cancel
from hpc_mp.job import ProgramSpec, load_resolved
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.plan import read_plan
from hpc_mp.rundir.runs import successors
from hpc_mp.runs.lock import held, holder

LiveRuns = Mapping[RunDirectory, SlurmJob | None]


@dataclass(frozen=True, slots=True)
class Keeper:
    """The verbs of a back end for its runs.

    Attributes:
        job_ids: returns the Slurm job of a run, then its successors; empty if the run has no job of its own.
        stop: asks the ranks of runs to save and stop, after ``RunDirectory.stop`` was written, for ranks that look for it.
        kill: ends the ranks of runs at once, and returns a message.
        logs: returns the logs of the launcher or of the job script, of the attempt whose files are given.

    ``stop`` and ``kill`` raise RunFailed if the ranks cannot be reached from here.
    """

    job_ids: Callable[[RunDirectory], list[str]]
    stop: Callable[[LiveRuns], None]
    kill: Callable[[LiveRuns], str]
    logs: Callable[[RunDirectory, RunDirectory], list[Path]]


def job_of(run: RunDirectory) -> str | None:
    """Return the id of the Slurm job that runs it; None if it has no separate job."""
    with suppress(OSError):
        return run.job_id.read_text(encoding="utf-8").strip()
    return None


# --- in Slurm's queue ------------------------------------------------------------------------------------------------


def _queued_ids(run: RunDirectory) -> list[str]:
    first = job_of(run)
    if first is None:
        return []
    return [first, *(job_id for job_id in successors(run, first) if job_id != first)]


def _signal_jobs(runs: LiveRuns) -> None:
    """Send each job the signal that its ranks expect. The supervisor must pass it on if srun is not their parent."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for run, job in runs.items():
        if job is not None:
            spec = load_resolved(run.job)
            through = isinstance(spec, ProgramSpec) and (spec.by_mpirun or spec.by_script)
            number: str = spec.program.signal if isinstance(spec, ProgramSpec) and not through else "USR2"
            groups.setdefault((number, through), []).append(job.id)
    with suppress(RunFailed):  # the jobs may have ended just now
        for (number, script), ids in groups.items():
            cancel(ids, number, script)


def _end_jobs(runs: LiveRuns) -> str:
    ids = [job.id for job in runs.values() if job is not None]
    cancel(ids)
    return f"ended Slurm job{'s' * (len(ids) > 1)} {', '.join(ids)}"


def _job_logs(run: RunDirectory, attempt: RunDirectory) -> list[Path]:
    """Return the logs of the run's own jobs. All elements of an array write theirs to the directory of the first one."""
    job = job_of(run)
    if job is not None and "_" in job:
        return sorted(run.path.parent.glob(f"*/{RunDirectory.slurm_log.name.format(job=job)}"))
    return _script_logs(run, attempt)


# --- held by its launcher --------------------------------------------------------------------------------------------


def _stop_programs(runs: LiveRuns) -> None:
    """Interrupt the launchers of programs, which do not look for the stop file of our own ranks."""
    for run in runs:
        if isinstance(load_resolved(run.job), ProgramSpec):
            _interrupt(run, (signal.SIGTERM,))


def _end_ranks(runs: LiveRuns) -> str:
    for run in runs:
        _interrupt(run, (signal.SIGTERM, signal.SIGINT))  # the launcher's second interrupt kills
    return f"ended the ranks of {several([run.path.name for run in runs])}" if len(runs) > 1 else "ended the ranks"


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


def _script_logs(run: RunDirectory, attempt: RunDirectory) -> list[Path]:
    """Return the logs of the attempt's job scripts; a step of an allocation has one too."""
    return sorted(attempt.slurm_log.found(), key=lambda path: path.stat().st_mtime)


QUEUED = Keeper(_queued_ids, _signal_jobs, _end_jobs, _job_logs)
HELD = Keeper(lambda run: [], _stop_programs, _end_ranks, _script_logs)
KEEPERS = {"slurm": QUEUED, "step": HELD, "local": HELD, "mpi": HELD}


def keeper(run: RunDirectory) -> Keeper:
    """Return the back end that started the run, by its plan; by its job if it has no plan that names one."""
    plan = read_plan(run)
    return KEEPERS.get(plan.place if plan is not None else "", QUEUED if job_of(run) is not None else HELD)


def reaching(run: RunDirectory, job: SlurmJob | None) -> Keeper:
    """Return the back end that reaches the ranks now. A launch that has not submitted its job yet still holds the run."""
    return keeper(run) if job is not None else HELD
