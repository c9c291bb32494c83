"""Removal of data of runs: which parts can be removed, their size, and the reason.

Nothing is removed of a run that may still continue, and never a checkpoint that it would resume from. Caches are shared by all
runs of a directory: an entry that any run refers to stays, and everything stays while any run continues.
"""

import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hpc_mp.base.command import Runner
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import ago
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.jobs import FINAL, UNKNOWN, SlurmJob
from hpc_mp.job import JobSpec, load_job
from hpc_mp.rundir import RunDirectory, problem
from hpc_mp.rundir.checkpoints import complete_steps
from hpc_mp.rundir.origin import counters_of
from hpc_mp.rundir.outcome import verdict
from hpc_mp.rundir.retention import best_checkpoint, leftovers
from hpc_mp.rundir.usage import size
from hpc_mp.runs.find import runs_below
from hpc_mp.runs.lock import held, hold
from hpc_mp.runs.status import described

QUIET_S = 3600.0  # a run without a verdict and without a recent write counts as ended after this time
MAKING_S = 86400.0  # temporary entries of the cache that are under construction are younger than this
CACHED = ("tokens-", "tokenizer-", "environment-")

Kind = Literal["checkpoint", "leftover", "cache", "run"]


@dataclass(frozen=True, slots=True)
class Removable:
    """A file or directory that can be removed. ``run``: the run that owns it, whose lock is held meanwhile; None if several runs
    share it. ``why``: reason why it is not needed, or the cost of needing it after all. ``referrers``: runs that name it in their
    job files but no longer need it."""

    kind: Kind
    path: Path
    bytes: int
    why: str
    run: Path | None = None
    referrers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spared:
    """An item that was examined but stays, with the reason."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class Pruning:
    """The removable items, and requested items that stay."""

    removable: tuple[Removable, ...]
    spared: tuple[Spared, ...]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.removable)

    def document(self, removed: Collection[Path], failed: Mapping[Path, str]) -> dict[str, Any]:
        """Return the document for ``--json``."""
        return {
            "bytes": self.bytes,
            "removable": [{**asdict(item), "path": str(item.path), "run": str(item.run) if item.run else None,
                           "removed": item.path in removed, "error": failed.get(item.path)} for item in self.removable],
            "kept": [{"path": str(item.path), "why": item.why} for item in self.spared],
        }


def prunable(runs: Sequence[RunDirectory], keep: int | None, whole: bool, ask: Runner = queue.patient) -> Pruning:
    """Return the removable items of these runs and of the caches beside them. Nothing is changed. ``keep``: number of the newest
    sound checkpoints of each run to keep; None: the number in its job. ``whole``: True for whole runs."""
    siblings = {run.path: run for run in runs_below(dict.fromkeys(run.path.parent.parent for run in runs))}
    all_runs = list({**siblings, **{run.path: run for run in runs}}.values())
    alive = {run.path: reason for run, jobs in zip(all_runs, described(all_runs, ask), strict=True)
             if (reason := going_on(run, jobs)) is not None}
    specs = {run.path: spec for run in all_runs if (spec := _spec(run)) is not None}
    ended = [run for run in runs if run.path not in alive]
    removed = _dispensable({run.path for run in ended}, specs) if whole else set()
    staying = {path: spec for path, spec in specs.items() if path not in removed}
    items = [item for run in ended for item in
             ([_whole(run, staying)] if whole else _parts(run, specs.get(run.path), keep, staying))]
    removable = [item for item in items if isinstance(item, Removable)]
    spared = [Spared(run.path, alive[run.path]) for run in runs if run.path in alive]
    spared += [item for item in items if isinstance(item, Spared)]
    for directory in dict.fromkeys(run.path.parent.parent for run in runs):
        remaining = [run for run in all_runs if run.path.parent.parent == directory and run.path not in removed]
        if busy := [run for run in remaining if run.path in alive]:
            if (directory / ".cache").is_dir():
                spared.append(Spared(directory / ".cache", f"{busy[0].path} may read it: {alive[busy[0].path]}"))
        else:
            removable += _cached(directory / ".cache", remaining)
    return Pruning(tuple(removable), tuple(spared))


def going_on(run: RunDirectory, jobs: Sequence[SlurmJob]) -> str | None:
    """Return the reason why a run may still continue; None if it has ended. In doubt it continues. ``jobs``: the Slurm jobs of
    the run and of its successors."""
    if held(run):
        return "a launch, or ranks on this machine, have it"
    if job := next((job for job in jobs if job.state not in FINAL | {UNKNOWN}), None):
        return f"its Slurm job {job.id} is {job.state}"
    if verdict(run) is not None:
        return None
    if job := next((job for job in jobs if job.state == UNKNOWN), None):
        return f"Slurm does not say what became of its job {job.id}, and the run directory does not either"
    silent = time.time() - _written(run)
    return f"nobody has said how it ended, and it was written to {ago(silent)}" if silent < QUIET_S else None


def remove(pruning: Pruning, done: Callable[[Removable], object]) -> dict[Path, str]:
    """Remove all removable items. Return those that failed, with the reason. ``done`` is called with each removed item."""
    failed: dict[Path, str] = {}
    for item in pruning.removable:
        if item.kind == "cache" and any(other.kind == "run" and other.path in failed for other in pruning.removable):
            failed[item.path] = "stays, for a run stays that may refer to it"
            continue
        try:
            with hold(RunDirectory(item.run)) if item.run is not None else nullcontext():
                _delete(item)
        except HpcMpError as error:  # it was launched again just now
            failed[item.path] = error.rule
        except OSError as error:
            failed[item.path] = f"cannot be removed ({error.strerror or error})"
        else:
            done(item)
    return failed


def _dispensable(removed: set[Path], specs: Mapping[Path, JobSpec]) -> set[Path]:
    """Return the runs to remove that no remaining run needs; runs needed by a kept one are kept too."""
    while needed := {path for path in removed
                     if _referrers(path, {other: spec for other, spec in specs.items() if other not in removed})[0]}:
        removed = removed - needed
    return removed


def _whole(run: RunDirectory, others: Mapping[Path, JobSpec]) -> Removable | Spared:
    needed, named = _referrers(run.path, others)
    if needed:
        return Spared(run.path, f"{needed[0]} needs it")
    return Removable("run", run.path, size(run.path), "all of it, its newest checkpoint too", run.path, tuple(named))


def _parts(run: RunDirectory, spec: JobSpec | None, keep: int | None,
           others: Mapping[Path, JobSpec]) -> Iterator[Removable | Spared]:
    """Yield old checkpoints, and the remains of crashed saves and damaged checkpoints. An unsound checkpoint does not count among
    the newest, and stays, because a file system may be to blame."""
    if spec is None:
        if not run.program.exists():  # a program saves where it likes
            yield Spared(run.path, "its job.toml is not understood")
        return
    saved = complete_steps(run.checkpoints)
    reasons = {path: reason for path in saved if (reason := problem(path, hashes=False)) is not None}
    yield from (Spared(path, reason) for path, reason in reasons.items())
    sound = [path for path in saved if path not in reasons]
    newest, best = sound[-(keep or spec.checkpoint.keep):], best_checkpoint(run)
    why = f"older than the newest {len(newest)}" + (", and not the best" if best else "")
    for path in sound:
        if path in newest or (best is not None and path == best.path):
            continue
        needed, _ = _referrers(path, others)
        yield Spared(path, f"{needed[0]} needs it") if needed else Removable("checkpoint", path, size(path), why, run.path)
    for path in leftovers(run):
        yield Removable("leftover", path, size(path), "a save that was not finished", run.path)
    for path in sorted(run.checkpoints.glob("damaged-*")) if sound else ():
        yield Removable("leftover", path, size(path), "a checkpoint that was found damaged and put aside", run.path)


def _referrers(path: Path, others: Mapping[Path, JobSpec]) -> tuple[list[str], list[str]]:
    """Return, in words, the other runs that name something in ``path`` and still need it, and those that only started from it."""
    needed: list[str] = []
    named: list[str] = []
    for other, spec in others.items():
        if path.is_relative_to(other):  # the run's own
            continue
        keys = {"checkpoint.resume": spec.checkpoint.resume, "model.pretrained": spec.model.pretrained,
                "data.tokenizer": spec.data.tokenizer}
        for key, value in keys.items():
            named_path = None if value is None else Path(value).resolve()
            if named_path is None or not (named_path.is_relative_to(path) or named_path == path.parent):  # or the job's name
                continue
            begun = key != "data.tokenizer" and bool(complete_steps(RunDirectory(other).checkpoints))
            (named if begun else needed).append(f"{other} ({key})")
    return needed, named


def _cached(cache: Path, runs: Iterable[RunDirectory]) -> Iterator[Removable]:
    """Yield entries that no run refers to, and entries whose construction was never finished."""
    used = {name for run in runs for name in _uses(run)}
    for path in sorted(cache.glob("*")):
        if path.name.startswith(CACHED) and path.name not in used:
            yield Removable("cache", path, size(path), "no run beside it refers to it; it is made anew when one needs it")
    for path in sorted(cache.glob(".*")):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - MAKING_S:
                yield Removable("cache", path, size(path), "was never finished")


def _uses(run: RunDirectory) -> Iterator[str]:
    """Yield names in the cache: the tokenizer, needed for an export, the tokens of its last attempt, and the tokens of the newest
    checkpoint, for runs of an older release."""
    with suppress(OSError):
        yield Path(run.tokenizer.read_text(encoding="utf-8").strip()).name
    with suppress(OSError):
        yield from run.tokens.read_text(encoding="utf-8").splitlines()
    for path in complete_steps(run.checkpoints)[-1:]:
        with suppress(HpcMpError):
            yield counters_of(path).origin.data


def _delete(item: Removable) -> None:
    """Remove an item. A run loses last the files that make it one, so an interrupted removal can be repeated. Raises OSError."""
    if item.kind == "run":
        run = RunDirectory(item.path)
        for path in item.path.iterdir():
            if path not in (run.job, run.placement):
                _erase(path)
    _erase(item.path)
    if item.kind == "run":
        with suppress(OSError):  # other runs of this name exist
            item.path.parent.rmdir()


def _erase(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _spec(run: RunDirectory) -> JobSpec | None:
    with suppress(HpcMpError):
        return load_job(run.job)
    return None


def _written(run: RunDirectory) -> float:
    times = [run.path.stat().st_mtime]
    for path in (run.status, run.metrics, run.main_log, run.job_id, run.checkpoints, run.log):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)
