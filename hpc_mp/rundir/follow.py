"""What a running attempt writes, read while it runs: new lines of metrics.jsonl, and status.json."""

from __future__ import annotations

import os

from hpc_mp.base.line_file import NewLines
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.records import RankStatus, StepMetrics, read_record, record_of_line

TAIL = 4096  # bytes of a log in which its last line is looked for


class AttemptReader:
    """The files of an attempt, and of those that Slurm makes of it by queueing the job again; earlier ones are passed over."""

    def __init__(self, run: RunDirectory, number: int) -> None:
        self.run = run
        self.number = number
        self._metrics = NewLines(run.metrics)

    def steps(self) -> list[StepMetrics]:
        """Metrics of the steps that ended since the last call."""
        records = (record_of_line(line, StepMetrics) for line in self._metrics.read())
        return [record for record in records if record is not None and record.attempt >= self.number]

    def status(self) -> RankStatus | None:
        """What rank 0 says it is doing; None while it has said nothing."""
        try:
            status = read_record(self.run.status, RankStatus)
        except (OSError, ValueError):
            return None
        return status if status.attempt >= self.number else None

    def last_words(self, rank: int) -> str:
        """The last line in the log of a rank; empty when it has said nothing in this attempt."""
        log = self.run.rank_log(rank)
        try:
            with open(log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                lines = file.read().decode(errors="replace").split("\n")
        except FileNotFoundError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
