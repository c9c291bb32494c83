"""Which run a word on the command line means: a directory, or the id of a Slurm job; and which runs there are."""

from __future__ import annotations

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
from hpc_mp.rundir.runs import is_run, numbered, successors
from hpc_mp.rundir.sweep import members

DEFAULT = str(Job.model_fields["directory"].default)  # job.directory


def find(word: Path, ask: Runner = queue.patient) -> RunDirectory:
    """The one run that is meant: a run directory, the newest one of ``DIRECTORY/NAME``, or that of a Slurm job.

    Raises:
        HpcMpError: there is none, or an array of several.
    """
    found = find_all(word, ask)
    if len(found) > 1:
        ids = ", ".join(sorted((text for run in found if (text := job_of(run)) is not None), key=_in_order))
        raise HpcMpError(f"job {word}", f"is an array of {len(found)} runs", f"name one of them: {ids}")
    return found[0]


def find_all(word: Path, ask: Runner = queue.patient) -> list[RunDirectory]:
    """The same; of a whole array all its runs, in their order. Raises HpcMpError: there is none."""
    if word.exists() or JOB_ID.fullmatch(str(word)) is None:
        return [find_run(word)]
    job_id = str(word)
    script = queue.script_of(job_id, ask)
    aside = [script.parent.parent] if script is not None and is_run(script.parent) else []
    runs = [run for base in aside for run in _of_name(base)] or list(runs_below(here()))
    found = [run for run in runs if _has_run(run, job_id)]
    if not found:
        where = ", ".join(map(str, here()))
        raise HpcMpError(f"job {job_id}", f"is no job of a run below {where}, and Slurm knows no script of a run for it",
                         "name the run's directory, or call this in the directory of its job file; `hpc-mp status` lists runs")
    return sorted(found, key=lambda run: _in_order(job_of(run) or ""))


def job_of(run: RunDirectory) -> str | None:
    """The id of the Slurm job that runs it; None where it has none of its own."""
    try:
        return run.job_id.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def sweep_of(run: RunDirectory) -> list[RunDirectory]:
    """All runs of the sweep that this run belongs to; itself alone where it belongs to none."""
    return list(members(run)) or [run]


def here(directory: Path | None = None) -> list[Path]:
    """Where the runs of a directory lie: ``runs`` in it, and ``job.directory`` of the job files in it; or around it, when it lies
    among runs itself."""
    base = (directory or Path.cwd()).resolve()
    for path in (base, *list(base.parents)[:2]):
        if is_run(path):
            return [path.parent.parent]
    if _of_name(base):
        return [base.parent]
    named = [base / DEFAULT, *(base / text for file in sorted(base.glob("*.toml")) if (text := _directory(file)))]
    found = [path for path in dict.fromkeys(named) if path.is_dir()]
    return found or ([base] if next(_below(base), None) is not None else [base / DEFAULT])


def runs_below(directories: Iterable[Path]) -> Iterator[RunDirectory]:
    """All runs of ``DIRECTORY/NAME/NNNN``, each once."""
    seen: set[Path] = set()
    for directory in directories:
        for run in _below(directory):
            if run.path not in seen:
                seen.add(run.path)
                yield run


def listing(word: Path | None) -> list[Path] | None:
    """Where the runs lie that are meant by no word, or by a directory of several jobs; None where a word means one run or job."""
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
    with suppress(OSError):  # somebody else's
        return [RunDirectory(path) for path in numbered(base) if is_run(path)]
    return []


def _has_run(run: RunDirectory, job_id: str) -> bool:
    """Whether the job runs it, or has run an earlier attempt of it, or is queued behind."""
    job = job_of(run)
    ids = {job, (job or "").partition("_")[0], *successors(run)}
    return job_id in ids or ((job is None or "_" not in job) and run.slurm_log(job_id).exists())


def _directory(file: Path) -> str | None:
    """``job.directory`` of a job file, as far as it is one."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))["job"]["directory"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(Path(found).expanduser()) if isinstance(found, str) else None


def _in_order(job_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in job_id.split("_") if part.isdigit())
