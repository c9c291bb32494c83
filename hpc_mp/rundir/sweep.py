"""The place of a run in its sweep, and the other runs of that sweep: ``sweep.json`` in the directory of each."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hpc_mp.base.files import read_json, write_json
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.runs import is_run, numbered


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


def best_of(losses: Iterable[tuple[float | None, float | None]]) -> tuple[int, str] | None:
    """Return the index of the best run of a sweep, and the criterion: the least held-out loss if every run with a loss has one,
    else the least last loss. None if fewer than two runs have a loss. ``losses``: last loss and least held-out loss of each
    run."""
    pairs = {index: pair for index, pair in enumerate(losses) if pair[0] is not None}
    if len(pairs) < 2:
        return None
    by, which = ("held-out loss", 1) if all(pair[1] is not None for pair in pairs.values()) else ("loss", 0)
    return min(pairs, key=lambda index: pairs[index][which] or 0.0), by
