"""Creation, numbering and lookup of runs, and the sweep of each; archiving of an attempt before the next one; queued jobs."""

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import read_json, write_json
from hpc_mp.base.text import several
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.records import Evaluation

GIVE = "pass DIRECTORY/NAME/0001, or DIRECTORY/NAME for the newest run of a job"
PRIVATE = 0o700  # logs and samples are the user's own: no other user may read a run directory


def create_run(directory: Path, name: str) -> RunDirectory:
    """Create the next free ``directory/name/NNNN`` (mode 700) with its sub-directories. Raises HpcMpError if the directory cannot
    be written."""
    base = directory / name
    try:
        base.mkdir(parents=True, exist_ok=True)
        number = max((int(p.name) for p in numbered(base)), default=0) + 1
        while True:
            path = base / f"{number:04d}"
            try:
                path.mkdir(mode=PRIVATE)
                break
            except FileExistsError:  # another launch took this number in between
                number += 1
        run = RunDirectory(path)
        for folder in (run.checkpoints, run.log, run.traces, run.failures, run.attempts):
            folder.mkdir(mode=PRIVATE)
    except OSError as error:
        raise HpcMpError(f"job.directory = {directory}", f"cannot be written ({error.strerror})",
                         "choose a writable directory on a file system that all nodes share") from None
    return run


def find_run(path: Path) -> RunDirectory:
    """Return ``path`` itself if it is a run directory, else the newest run below ``DIRECTORY/NAME``. Raises HpcMpError if no run
    exists there."""
    path = path.resolve()
    if is_run(path):
        return RunDirectory(path)
    runs = [run for run in numbered(path) if is_run(run)]
    if not runs:
        if not path.exists():
            raise HpcMpError(f"run {path}", "does not exist", f"{GIVE}; `hpc-mp status` lists the runs of the job files here")
        named = sorted(entry.name for entry in path.iterdir() if any(map(is_run, numbered(entry)))) if path.is_dir() else []
        remedy = f"pass the directory of one of its jobs: {several(named)}" if named else GIVE
        raise HpcMpError(f"run {path}", "is not a run directory, and contains no numbered runs", remedy)
    return RunDirectory(max(runs, key=lambda run: int(run.name)))


def prepare_resume(run: RunDirectory) -> int:
    """Archive the previous attempt in ``attempts/K/``: copies of its inputs, and its logs. Return the new attempt's number. A
    rank of that attempt that still runs, on a node that was cut off, continues to write to the archived logs. Raises HpcMpError
    if the run directory cannot be written; it is left unchanged."""
    attempt = run.attempt()
    aside = RunDirectory(run.put_away(attempt))
    try:
        aside.path.mkdir(mode=PRIVATE, parents=True)
        for now, then in ((run.job, aside.job), (run.placement, aside.placement), (run.plan, aside.plan),
                          (run.script, aside.script), (run.attempt_record, aside.attempt_record), (run.outcome, aside.outcome)):
            if now.exists():
                shutil.copy2(now, then)
        run.log.rename(aside.log)
        run.log.mkdir(mode=PRIVATE)
    except OSError as error:
        if not run.log.exists():
            aside.log.rename(run.log)
        shutil.rmtree(aside.path, ignore_errors=True)
        raise HpcMpError(f"run {run.path}", f"cannot be written ({error.strerror})", "free space on its file system") from None
    return attempt + 1


def is_run(path: Path) -> bool:
    """Return True if ``path`` is a run. A job file without a placement may be the user's own, in the directory of the launch."""
    run = RunDirectory(path)
    return run.job.is_file() and run.placement.is_file()


def numbered(base: Path) -> list[Path]:
    """Return the directories below ``DIRECTORY/NAME`` that may be runs."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return [Path(e.path) for e in os.scandir(base) if e.name.isdigit() and e.is_dir()]
    return []


def record_successors(run: RunDirectory, jobs: list[str]) -> None:
    """Write the ids of the queued jobs. Raises OSError."""
    write_json(run.successors, jobs)


def successors(run: RunDirectory, job_id: str | None = None) -> tuple[str, ...]:
    """Return ids of the jobs queued behind ``job_id``, by default all of them; the next one first."""
    try:
        jobs = tuple(map(str, read_json(run.successors)))
    except (OSError, ValueError):
        return ()
    if job_id is None:
        return jobs
    return jobs[jobs.index(job_id) + 1:] if job_id in jobs else ()


@dataclass(frozen=True, slots=True)
class SweepMember:
    """The place of a run in its sweep.

    Attributes:
        first: number of the sweep's first run (``0001``), which identifies the sweep among the runs in the same directory.
        number: index of this run, from 0.
        of: number of runs in the sweep.
        values: values of this run that replace the job file's, by key.
    """

    first: str
    number: int
    of: int
    values: Mapping[str, Any]


def write_member(run: RunDirectory, member: SweepMember) -> None:
    """Write the run's place in its sweep. Raises OSError."""
    write_json(run.sweep, asdict(member))


def read_member(run: RunDirectory) -> SweepMember | None:
    """Read the run's place; None for a run outside of a sweep, or if the file is broken."""
    try:
        tree = read_json(run.sweep)
        return SweepMember(str(tree["first"]), int(tree["number"]), int(tree["of"]), dict(tree["values"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def members(run: RunDirectory) -> dict[RunDirectory, SweepMember]:
    """Return all runs of this run's sweep, in their order; empty outside of a sweep."""
    mine = read_member(run)
    if mine is None:
        return {}
    by_run: dict[RunDirectory, SweepMember] = {}
    with suppress(OSError):  # a directory of another user
        for path in numbered(run.path.parent):
            member = read_member(RunDirectory(path)) if is_run(path) else None
            if member is not None and member.first == mine.first:
                by_run[RunDirectory(path)] = member
    return dict(sorted(by_run.items(), key=lambda item: (item[1].number, item[0].path)))


def end_sweep(run: RunDirectory) -> None:
    """Prevent further runs of the sweep of ``run``. Raises OSError."""
    if (mine := read_member(run)) is not None:
        (run.path.parent / mine.first / RunDirectory.sweep_stop.name).touch()


def best_of(runs: Iterable[tuple[float | None, Evaluation | None]]) -> tuple[int, str] | None:
    """Return the index of the best run of a sweep, and the criterion: that of evaluations if every run with a loss has one, else
    the least last loss. None if fewer than two runs have a loss. ``runs``: last loss and best evaluation of each run."""
    pairs = {index: (loss, evaluation) for index, (loss, evaluation) in enumerate(runs) if loss is not None}
    if len(pairs) < 2:
        return None
    costs = {index: evaluation.cost for index, (_, evaluation) in pairs.items() if evaluation is not None}
    criteria = {evaluation and evaluation.criterion for _, evaluation in pairs.values()}
    if costs.keys() == pairs.keys() and len(criteria) == 1:
        return min(costs, key=costs.__getitem__), f"held-out {criteria.pop()}"
    return min(pairs, key=lambda index: pairs[index][0]), "loss"
