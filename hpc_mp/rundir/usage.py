"""The cost of a run so far: node hours, GPU hours, time in the queue, steps trained and lost. All of it comes from the run
directory, because most clusters have no accounting that a user may read."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.files import read_lines
from hpc_mp.base.line_file import append_lines
from hpc_mp.base.text import counted, duration
from hpc_mp.rundir.attempt import AttemptRecord, read_attempt
from hpc_mp.rundir.history import AttemptEnd, known_history
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.records import RankStart, StepMetrics, line_of, read_records, record_of

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a run.

    Attributes:
        node_hours: time from the start of each attempt to its end, times its nodes; emulated nodes count too.
        gpu_hours: the same time, times the ranks that had a GPU; 0 on CPUs.
        queue_s: seconds from each submission or requeue to the start of its job; None if no Slurm job was queued.
        lost_steps: steps that were trained again from an earlier checkpoint; ``lost_s``: the seconds that they took.
    """

    node_hours: float
    gpu_hours: float
    queue_s: float | None
    lost_steps: int
    lost_s: float

    def words(self) -> str:
        """Return the cost in words; empty for a run that has cost nothing yet."""
        parts = [f"{_hours(self.node_hours)} node hours" if self.node_hours else "",
                 f"{_hours(self.gpu_hours)} GPU hours" if self.gpu_hours else "",
                 f"{duration(self.queue_s)} in the queue" if self.queue_s and self.queue_s >= 1 else "",
                 f"{counted(self.lost_steps, 'step')} trained again ({duration(self.lost_s)})" if self.lost_steps else ""]
        return ", ".join(filter(None, parts))


def usage(run: RunDirectory, until: float | None, waits: bool = False) -> Usage:
    """Return the cost of a run. ``until``: unix seconds, for a run that continues; None: until its end, as far as the run
    directory shows it. ``waits``: True if its job is in the queue and has no process now."""
    number = run.attempt()
    starts = read_records(run.ranks, RankStart)
    ends = known_history(run)
    lost = {(step.attempt, step.step): step for step in read_records(run.lost, StepMetrics)}
    node_s = gpu_s = queue_s = 0.0
    before = launched(run)
    for attempt in range(1, number + 1):
        mine = {start.rank: start for start in starts if start.attempt == attempt}
        record = _record(run, attempt)
        resumed = next((end.time for end in ends if end.attempt == attempt and end.action == "resume"), None)
        queued = before if resumed is None else resumed
        if not mine and record is None:
            queue_s += max(0.0, until - queued) if until is not None and attempt == number else 0.0
            continue
        began = record.time if record is not None else min(start.time for start in mine.values())
        goes_on = until is not None and attempt == number
        end = until if until is not None and goes_on and not waits else _end(run, attempt, number, began, ends, lost.values())
        if until is not None and goes_on and waits:
            queue_s += max(0.0, until - end)
        seconds = max(0.0, end - began)
        node_s += seconds * (len(record.hosts if record is not None else ()) or len({start.node for start in mine.values()}))
        gpu_s += seconds * sum(start.device not in ("", "cpu") for start in mine.values())
        queue_s += max(0.0, began - queued)
        before = end
    return Usage(node_s / HOUR_S, gpu_s / HOUR_S, queue_s if run.job_id.exists() else None, len(lost),
                 sum(step.step_time_s for step in lost.values()))


def _record(run: RunDirectory, attempt: int) -> AttemptRecord | None:
    """Return the record that the supervisor wrote when the attempt began; None while it waits, and without a supervisor."""
    try:
        record = read_attempt(run.of_attempt(attempt).attempt_record)
    except (OSError, ValueError):
        return None
    return record if record.attempt == attempt and record.time else None


def launched(run: RunDirectory) -> float:
    """Return the unix seconds of the run's first launch: the mtime of its first attempt's job file, preserved in copies."""
    first = run.of_attempt(1).job
    return (first if first.exists() else run.job if run.job.exists() else run.path).stat().st_mtime


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory. Vanished files do not count; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        return sum(_sizes(path))
    with suppress(OSError):
        return path.lstat().st_size
    return 0


def cut_steps(run: RunDirectory, step: int) -> None:
    """Move the metrics of the steps after ``step`` to the lost ones: training resumes there, and writes them again."""
    beyond = [record for line in read_lines(run.metrics)
              if (record := record_of(line, StepMetrics)) is not None and record.step > step]
    append_lines(run.lost, [line_of(record) for record in beyond])


def _sizes(path: Path) -> Iterator[int]:
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(Path(entry.path))
                else:
                    yield entry.stat(follow_symlinks=False).st_size


def _end(run: RunDirectory, attempt: int, newest: int, began: float, ends: Sequence[AttemptEnd],
         lost: Iterable[StepMetrics]) -> float:
    """Return the end of an attempt: from its supervisor, else the mtime of its verdict, preserved in copies, else its steps."""
    for end in ends:
        if end.attempt == attempt and end.action != "resume":
            return end.time
    with suppress(OSError):
        return run.of_attempt(attempt).outcome.stat().st_mtime
    if attempt == newest:
        with suppress(OSError):
            return run.metrics.stat().st_mtime
    steps = [*read_records(run.metrics, StepMetrics), *lost]
    return began + sum(step.step_time_s for step in steps if step.attempt == attempt)


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.2f}" if hours >= 0.01 else "under 0.01"
