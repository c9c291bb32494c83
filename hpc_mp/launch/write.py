"""The files of a run that are there before its ranks are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_mp.cluster.slurm_query import version
from hpc_mp.errors import HpcMpError
from hpc_mp.job import JobSpec, dump_job
from hpc_mp.launch.compose import Plan
from hpc_mp.launch.render import Script, render
from hpc_mp.launch.resume import Resumed, hold
from hpc_mp.placement import to_dict
from hpc_mp.rundir import RunDirectory, create_run, prepare_resume, write_json, write_text


def next_run(spec: JobSpec) -> Path:
    """Where a new run will probably lie; nothing is made."""
    base = Path(spec.job.directory) / spec.job.name
    taken = (int(path.name) for path in base.glob("[0-9]*") if path.name.isdigit())
    return base / f"{max(taken, default=0) + 1:04d}"


def script(plan: Plan, run: Path) -> Script:
    """The job script of a plan, to lie in ``run``. Raises HpcMpError as ``render`` does."""
    return render(plan.spec, run, python=sys.executable,
                  slurm_version=None if plan.where.place == "local" else version())


@contextmanager
def begin(plan: Plan, resumed: Resumed | None) -> Iterator[tuple[RunDirectory, int, int]]:
    """Make a run directory, or take the resumed one into its next attempt, and write what ranks read.

    Gives the run, the number of the attempt and the open lock file; the run is held until the block ends.

    Raises:
        HpcMpError: a job that cannot be rendered, or a directory that cannot be written.
    """
    script(plan, next_run(plan.spec))  # what it refuses, it refuses before anything is made
    if resumed is not None:
        number = prepare_resume(resumed.run)
        _write(plan, resumed.run)
        yield resumed.run, number, resumed.lock
        return
    run = create_run(Path(plan.spec.job.directory), plan.spec.job.name)
    with hold(run) as lock:
        _write(plan, run)
        yield run, 1, lock


def _write(plan: Plan, run: RunDirectory) -> None:
    text = script(plan, run.path).text
    try:
        write_text(run.job, dump_job(plan.spec))
        write_json(run.placement, to_dict(plan.placement))
        write_text(run.script, text)
    except OSError as error:
        raise HpcMpError(f"run {run.path}", f"cannot be written ({error.strerror})",
                         "make room, or choose another job.directory") from None
