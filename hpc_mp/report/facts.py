"""The content of a run directory, read into one frozen value. Absent or broken files are left out and listed as problems."""

import re
from collections.abc import Callable, Mapping
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
from hpc_mp.rundir.runs import SweepMember, read_member
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
        best: the best checkpoint on held-out text; None if none was evaluated.
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
    traces = filter(None, [reader.read(path, read_record, path, RankTrace) for path in run.trace.found()])
    earlier = {number: reader.placement(RunDirectory(run.put_away(number)).placement) for number in range(1, attempt)}
    status = reader.read(run.status, read_record, run.status, RankStatus)
    verdict = reader.read(run.outcome, read_verdict, run)
    until = status.time if status is not None and verdict is None else None
    job = reader.job()
    log = reader.read(run.main_log, lambda: run.main_log.read_bytes().decode(errors="replace")) or ""
    return RunFacts(
        path=run.path,
        attempt=attempt,
        spec=job if isinstance(job, JobSpec) else None,
        placement=reader.placement(run.placement),
        plan=read_plan(run),
        earlier={number: placement for number, placement in earlier.items() if placement is not None},
        metrics=reader.lines(run.metrics, StepMetrics),
        usage=reader.read(run.ranks, usage, run, until),
        evaluations=(evaluations := reader.lines(run.evaluations, Evaluation)),
        best=best_checkpoint(run) if evaluations else None,
        written=run.metrics.stat().st_mtime if run.metrics.exists() else None,
        starts=reader.lines(run.ranks, RankStart),
        traces={trace.rank: trace for trace in traces if trace.attempt == attempt},
        failures=reader.failures(),
        causes={number: attempt_cause for number in range(1, attempt + 1) if (attempt_cause := cause(run, number)) is not None},
        status=status if status is not None and status.attempt == attempt else None,
        verdict=verdict,
        log=tuple(_log_line(line) for line in log.splitlines() if line.strip()),
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

    def read(self, path: Path, function: Callable[..., R], *arguments: Any) -> R | None:
        """Return the result of a function that reads the file; None for an absent or a broken one."""
        try:
            return function(*arguments)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, HpcMpError) as error:
            self.problems.append(f"{path.relative_to(self.run.path)} cannot be read ({error})")
            return None

    def job(self) -> AnySpec | None:
        try:
            return load_resolved(self.run.job)
        except HpcMpError as error:
            self.problems.append(f"job.toml is invalid: {error}")
            return None

    def placement(self, path: Path) -> Placement | None:
        return self.read(path, lambda: from_dict(read_json(path)))

    def failures(self) -> tuple[RankFailure, ...]:
        for path in self.run.failure.found():
            self.read(path, read_failure, path)
        return tuple(read_failures(self.run))

    def lines(self, path: Path, kind: type[R]) -> tuple[R, ...]:
        lines = self.read(path, lambda: list(understood_lines(path, kind))) or []
        records = tuple(record for record in lines if record is not None)
        if broken := len(lines) - len(records):
            self.problems.append(f"{path.relative_to(self.run.path)}: {broken} of {len(lines)} lines are invalid")
        return records


def _log_line(line: str) -> LogLine:
    match = re.fullmatch(r"(\d\d:\d\d:\d\d) (.*)", line)
    return LogLine(*match.groups()) if match else LogLine("", line)
