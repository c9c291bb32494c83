"""The content of a run directory, read into one frozen value. Absent or broken files are left out and listed as problems."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hpc_mp.base.errors import HpcMpError
from hpc_mp.diagnosis.cause import cause
from hpc_mp.job import AnySpec, JobSpec, ProgramSpec, load_resolved
from hpc_mp.layout.placement import Placement, from_dict
from hpc_mp.rundir import RunDirectory, read_json
from hpc_mp.rundir.failures import RankFailure, read_failure, read_failures
from hpc_mp.rundir.outcome import Cause, Outcome, read_verdict
from hpc_mp.rundir.plan import RunPlan, read_plan
from hpc_mp.rundir.records import Evaluation, RankStart, RankStatus, RankTrace, StepMetrics, read_record, understood_lines
from hpc_mp.rundir.retention import BestCheckpoint, best_checkpoint
from hpc_mp.rundir.sweep import SweepMember, read_member
from hpc_mp.rundir.usage import Usage, usage


class LogLine(NamedTuple):
    """A line of ``log/main.log``."""

    time: str
    text: str


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run directory.

    Attributes:
        attempt: number of the current attempt, from 1; ``starts`` and ``failures`` contain all attempts, ``traces`` (by rank),
            ``status`` and ``verdict`` only the current one. The failure of a rank that was restarted in the same attempt is
            left out.
        spec: job file of a training; program: job file of the user's program. Both None for an invalid job file.
        plan: predicted needs of the current attempt and the division of its layers; None without one.
        causes: attempt → cause of its failure, if known.
        earlier: attempt → its placement, for attempts before the current one.
        sweep: its place in its sweep; None outside of a sweep.
        usage: its cost until it ended, or until its last record.
        best: the checkpoint with the least loss on held-out text; None if none was evaluated.
        written: unix seconds of the last write to ``metrics.jsonl``; None without the file.
        problems: existing files that could not be read.
    """

    path: Path
    attempt: int
    spec: JobSpec | None
    placement: Placement | None
    plan: RunPlan | None
    earlier: Mapping[int, Placement]
    metrics: tuple[StepMetrics, ...]
    evaluations: tuple[Evaluation, ...]
    usage: Usage | None
    best: BestCheckpoint | None
    written: float | None
    starts: tuple[RankStart, ...]
    traces: Mapping[int, RankTrace]
    failures: tuple[RankFailure, ...]
    causes: Mapping[int, Cause]
    status: RankStatus | None
    verdict: Outcome | None
    log: tuple[LogLine, ...]
    problems: tuple[str, ...]
    sweep: SweepMember | None = None
    program: ProgramSpec | None = None


def read_facts(run: RunDirectory) -> RunFacts:
    """Read everything that a page needs. Never raises for a run that has only begun or is half-written."""
    reader = _RunReader(run)
    attempt = run.attempt()
    traces = reader.all(run.trace.found(), RankTrace)
    earlier = {number: reader.placement(RunDirectory(run.put_away(number)).placement)
               for number in range(1, attempt)}
    status = reader.one(run.status, RankStatus)
    starts = reader.lines(run.ranks, RankStart)
    job = reader.job()
    return RunFacts(
        path=run.path,
        attempt=attempt,
        spec=job if isinstance(job, JobSpec) else None,
        placement=reader.placement(run.placement),
        plan=read_plan(run),
        earlier={number: placement for number, placement in earlier.items() if placement is not None},
        metrics=reader.lines(run.metrics, StepMetrics),
        usage=reader.usage(status),
        evaluations=(evaluations := reader.lines(run.evaluations, Evaluation)),
        best=best_checkpoint(run) if evaluations else None,
        written=run.metrics.stat().st_mtime if run.metrics.exists() else None,
        starts=starts,
        traces={trace.rank: trace for trace in traces if trace.attempt == attempt},
        failures=reader.failures(),
        causes={number: attempt_cause for number in range(1, attempt + 1) if (attempt_cause := cause(run, number)) is not None},
        status=status if status is not None and status.attempt == attempt else None,
        verdict=reader.verdict(),
        log=tuple(_log_line(line) for line in reader.text(run.main_log).splitlines() if line.strip()),
        problems=tuple(reader.problems),
        sweep=read_member(run),
        program=job if isinstance(job, ProgramSpec) else None,
    )


R = TypeVar("R")


class _RunReader:
    """Reader of one run's files. Broken files become problems, absent files are ignored."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.problems: list[str] = []

    def text(self, path: Path) -> str:
        try:
            return path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            self._problem(path, error)
            return ""

    def job(self) -> AnySpec | None:
        try:
            return load_resolved(self.run.job)
        except HpcMpError as error:
            self.problems.append(f"job.toml is invalid: {error}")
            return None

    def placement(self, path: Path) -> Placement | None:
        document = self._document(path)
        try:
            return None if document is None else from_dict(document)
        except HpcMpError as error:
            self._problem(path, error)
            return None

    def one(self, path: Path, kind: type[R]) -> R | None:
        try:
            return read_record(path, kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._problem(path, error)
            return None

    def all(self, paths: Iterable[Path], kind: type[R]) -> tuple[R, ...]:
        records = (self.one(path, kind) for path in paths)
        return tuple(record for record in records if record is not None)

    def failures(self) -> tuple[RankFailure, ...]:
        for path in self.run.failure.found():
            try:
                read_failure(path)
            except (OSError, ValueError) as error:
                self._problem(path, error)
        return tuple(read_failures(self.run))

    def verdict(self) -> Outcome | None:
        try:
            return read_verdict(self.run)
        except ValueError as error:
            self._problem(self.run.outcome, error)
            return None

    def usage(self, status: RankStatus | None) -> Usage | None:
        """Return the cost; None if it cannot be determined, for example for a copied run without its job file."""
        try:
            return usage(self.run, status.time if status is not None and self.verdict() is None else None)
        except OSError as error:
            self._problem(self.run.ranks, error)
            return None

    def lines(self, path: Path, kind: type[R]) -> tuple[R, ...]:
        try:
            lines = list(understood_lines(path, kind))
        except OSError as error:
            self._problem(path, error)
            return ()
        records = tuple(record for record in lines if record is not None)
        if broken := len(lines) - len(records):
            self.problems.append(f"{self._name(path)}: {broken} of {len(lines)} lines are invalid")
        return records

    def _document(self, path: Path) -> Any:
        try:
            return read_json(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._problem(path, error)
            return None

    def _problem(self, path: Path, error: Exception) -> None:
        self.problems.append(f"{self._name(path)} cannot be read ({error})")

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.run.path))


def _log_line(line: str) -> LogLine:
    match = re.fullmatch(r"(\d\d:\d\d:\d\d) (.*)", line)
    return LogLine(*match.groups()) if match else LogLine("", line)
