"""The files of a run that exist before its ranks start."""

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bad_nodes import write_exclusions
from hpc_mp.job import AnySpec, JobSpec, ProgramSpec, dump_job
from hpc_mp.job.values import toml_value
from hpc_mp.launch.plan import JobPlan
from hpc_mp.launch.render import JobScript, render
from hpc_mp.launch.resume import Resumed
from hpc_mp.launch.verification import known
from hpc_mp.layout.placement import to_dict
from hpc_mp.rundir import RunDirectory, create_run, prepare_resume, write_json, write_text
from hpc_mp.rundir.history import AttemptEnd, furthest_step, record
from hpc_mp.rundir.plan import write_plan
from hpc_mp.rundir.program import write_program
from hpc_mp.rundir.runs import write_member
from hpc_mp.runs.lock import hold


def next_run(spec: AnySpec) -> Path:
    """Return the probable path of a new run; nothing is created."""
    base = Path(spec.job.directory) / spec.job.name
    taken = (int(path.name) for path in base.glob("[0-9]*") if path.name.isdigit())
    return base / f"{max(taken, default=0) + 1:04d}"


def check_writable(spec: AnySpec) -> None:
    """Raise HpcMpError if no run can be created in ``job.directory``, judged by its nearest existing directory."""
    directory = Path(spec.job.directory)
    nearest = next(path for path in (directory / spec.job.name, directory, *directory.parents) if os.path.lexists(path))
    if not os.access(nearest, os.W_OK | os.X_OK) or not nearest.is_dir():
        raise HpcMpError(f"job.directory = {toml_value(spec.job.directory)}",
                         f"cannot hold runs: {nearest} {'cannot be written' if nearest.is_dir() else 'is no directory'}",
                         "mend its permissions, or choose another directory")


def next_runs(plans: Sequence[JobPlan], resumed: Resumed | None) -> tuple[Path, ...]:
    """Return the paths of the runs of these plans: the resumed one, else consecutive new ones; nothing is created."""
    first = resumed.run.path if resumed is not None else next_run(plans[0].spec)
    return (first, *(first.with_name(f"{int(first.name) + number:04d}") for number in range(1, len(plans))))


@contextmanager
def withdrawn(runs: Sequence[RunDirectory]) -> Iterator[None]:
    """Remove new runs, and the directories that become empty, if the block fails: nothing of them was started."""
    try:
        yield
    except Exception:
        for run in runs:
            shutil.rmtree(run.path, ignore_errors=True)
            with suppress(OSError):  # other runs are there
                run.path.parent.rmdir()
                run.path.parent.parent.rmdir()
        raise


def script(plan: JobPlan, *runs: Path, earlier: JobScript | None = None) -> JobScript:
    """Return the job script of a plan, for its run, or for all runs of a sweep. Raises HpcMpError as ``render`` does.
    ``earlier``: a script of the plan, which is returned if it is for these runs."""
    if earlier is not None and earlier.runs == runs:
        return earlier
    return render(plan.spec, runs, plan.facts, python=sys.executable, template=plan.template, dependency=plan.depends.option)


class Begun(NamedTuple):
    """A run whose attempt with this number may start its ranks; ``lock`` is the descriptor of its open lock file."""

    run: RunDirectory
    attempt: int
    lock: int


@contextmanager
def begin(plan: JobPlan, resumed: Resumed | None, rendered: JobScript | None = None) -> Iterator[Begun]:
    """Create a run directory, or begin the next attempt of the resumed run, and write the files that ranks read. The run is held
    until the block ends. ``rendered``: the script, if it was rendered before. It is rendered anew if another launch has taken the
    expected directory. Raises HpcMpError if the job cannot be rendered, or a directory cannot be written."""
    text = script(plan, *next_runs([plan], resumed), earlier=rendered)  # refusals come before anything is created
    if resumed is not None:
        number = prepare_resume(resumed.run)
        earlier = resumed.run
        for file in (earlier.stop, earlier.outcome, earlier.job_id, earlier.successors, earlier.measured):
            file.unlink(missing_ok=True)
        step = furthest_step(resumed.run, plan.spec)
        record(resumed.run, AttemptEnd("", number, step, "resumed", "", (), "resume", time.time()))
        _write(plan, resumed.run, text)
        yield Begun(resumed.run, number, resumed.lock)
        return
    run = create_run(Path(plan.spec.job.directory), plan.spec.job.name)
    with hold(run) as lock:
        _write(plan, run, script(plan, run.path, earlier=text))
        yield Begun(run, 1, lock)


def begin_sweep(plans: Sequence[JobPlan], rendered: JobScript | None = None) -> tuple[RunDirectory, ...]:
    """Create a run directory for each run of a sweep; the first one contains the script of all. ``rendered``: as for ``begin``.
    Raises HpcMpError as ``begin`` does."""
    text = script(plans[0], *next_runs(plans, None), earlier=rendered)
    runs = tuple(create_run(Path(plan.spec.job.directory), plan.spec.job.name) for plan in plans)
    text = script(plans[0], *(run.path for run in runs), earlier=text)
    for plan, run in zip(plans, runs, strict=True):
        _write(plan, run, text)
    return runs


def _write(plan: JobPlan, run: RunDirectory, rendered: JobScript) -> None:
    try:
        write_text(run.job, dump_job(plan.spec))
        write_json(run.placement, to_dict(plan.placement))
        write_plan(run, plan.record)
        if isinstance(plan.spec, ProgramSpec):
            write_program(run.program, plan.spec)
            if plan.spec.by_script:
                shutil.copyfile(Path(plan.spec.program.directory) / plan.spec.program.command[0], run.user_script)
                run.user_script.chmod(0o700)
        if plan.member is not None:
            write_member(run, replace(plan.member, first=plan.member.first or rendered.runs[0].name))
        write_text(run.script, rendered.text)
        run.watch_id.unlink(missing_ok=True)  # a watch of an earlier launch notices that it was replaced
        run.excluded.unlink(missing_ok=True)
        if plan.avoided:
            write_exclusions(run.excluded, plan.avoided)
        write_text(run.clean_environment, asset(f"slurm/{run.clean_environment.name}").read_text(encoding="utf-8"))
        record = known(plan.spec) if isinstance(plan.spec, JobSpec) else None
        run.verified.unlink(missing_ok=True)
        if record is not None:
            write_json(run.verified, asdict(record))
        if plan.measured is not None:
            write_json(run.measured, asdict(plan.measured))
    except OSError as error:
        raise HpcMpError(f"run {run.path}", f"cannot be written ({error.strerror})",
                         "make room, or choose another job.directory") from None
