"""Lookup of runs by a command-line argument (a directory or the id of a Slurm job), and listing of runs."""

import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hpc_mp.base.command import Runner
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.job.spec import Job
from hpc_mp.job.values import JOB_ID
from hpc_mp.rundir import RunDirectory, find_run
from hpc_mp.rundir.runs import is_run, members, numbered, successors
from hpc_mp.runs.keepers import job_of

DEFAULT = str(Job.model_fields["directory"].default)  # job.directory


def find(word: Path, ask: Runner = queue.patient) -> RunDirectory:
    """Return the run that an argument denotes: a run directory, the newest run of ``DIRECTORY/NAME``, or that of a Slurm job.
    Raises HpcMpError if no run exists, or the job is an array of several."""
    runs = find_all(word, ask)
    if len(runs) > 1:
        ids = ", ".join(sorted((text for run in runs if (text := job_of(run)) is not None), key=_in_order))
        raise HpcMpError(f"job {word}", f"is an array of {len(runs)} runs", f"name one of them: {ids}")
    return runs[0]


def find_all(word: Path, ask: Runner = queue.patient) -> list[RunDirectory]:
    """Return the run, or all runs of a whole array in their order. Raises HpcMpError if none exists."""
    if word.exists() or JOB_ID.fullmatch(str(word)) is None:
        return [find_run(word)]
    job_id = str(word)
    script = queue.script_of(job_id, ask)
    aside = [script.parent.parent] if script is not None and is_run(script.parent) else []
    runs = [run for base in aside for run in _of_name(base)] or list(runs_below(here()))
    matching = [run for run in runs if _has_run(run, job_id)]
    if not matching:
        directories = ", ".join(map(str, here()))
        raise HpcMpError(f"job {job_id}", f"is no job of a run below {directories}, and Slurm knows no script of a run for it",
                         "name the run's directory, or call this in the directory of its job file; `hpc-mp status` lists runs")
    return sorted(matching, key=lambda run: _in_order(job_of(run) or ""))


def sweep_of(run: RunDirectory) -> list[RunDirectory]:
    """Return all runs of the sweep that this run belongs to; only the run itself if it belongs to none."""
    return list(members(run)) or [run]


def here(directory: Path | None = None) -> list[Path]:
    """Return the directories with the runs of a directory: ``runs`` in it, and ``job.directory`` of the job files in it; or its
    parent, if it is among runs itself."""
    base = (directory or Path.cwd()).resolve()
    for path in (base, *list(base.parents)[:2]):
        if is_run(path):
            return [path.parent.parent]
    if _of_name(base):
        return [base.parent]
    named = [base / DEFAULT, *(base / text for file in sorted(base.glob("*.toml")) if (text := _directory(file)))]
    directories = [path for path in dict.fromkeys(named) if path.is_dir()]
    return directories or ([base] if next(_below(base), None) is not None else [base / DEFAULT])


def runs_below(directories: Iterable[Path]) -> Iterator[RunDirectory]:
    """Yield all runs of ``DIRECTORY/NAME/NNNN``, each once."""
    paths: set[Path] = set()
    for directory in directories:
        for run in _below(directory):
            if run.path not in paths:
                paths.add(run.path)
                yield run


def listing(word: Path | None) -> list[Path] | None:
    """Return the directories of the runs to list, without argument or for a directory of several jobs; None for a run."""
    if word is None:
        return here()
    if not word.is_dir() or is_run(word.resolve()) or _of_name(word.resolve()):
        return None
    return here(word)


def _below(directory: Path) -> Iterator[RunDirectory]:
    try:
        names = [path for path in directory.iterdir() if not path.name.startswith(".")]
    except OSError:
        return
    for name in names:
        yield from _of_name(name.resolve())


def _of_name(base: Path) -> list[RunDirectory]:
    with suppress(OSError):  # a directory of another user
        return [RunDirectory(path) for path in numbered(base) if is_run(path)]
    return []


def _has_run(run: RunDirectory, job_id: str) -> bool:
    """Return True if the job runs it, has run an earlier attempt of it, or is queued behind."""
    job = job_of(run)
    ids = {job, (job or "").partition("_")[0], *successors(run)}
    return job_id in ids or ((job is None or "_" not in job) and run.slurm_log(job_id).exists())


def _directory(file: Path) -> str | None:
    """Return ``job.directory`` of a job file; None if the file is not one."""
    try:
        directory = tomllib.loads(file.read_text(encoding="utf-8"))["job"]["directory"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(Path(directory).expanduser()) if isinstance(directory, str) else None


def _in_order(job_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in job_id.split("_") if part.isdigit())
