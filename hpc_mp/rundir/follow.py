"""What a running attempt writes, read while it runs: new lines of metrics.jsonl, and status.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hpc_mp.rundir import RunDirectory, read_json

TAIL = 4096  # bytes of a log in which its last line is looked for


class Tail:
    """Reads a JSON-lines file bit by bit; one that was replaced (a resume cuts metrics back) is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """The complete records that came since the last call."""
        try:
            with open(self._path, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(complete + newline)
        return [json.loads(line) for line in complete.splitlines()]


class AttemptReader:
    """The files of an attempt, and of those that Slurm makes of it by queueing the job again; earlier ones are passed over."""

    def __init__(self, run: RunDirectory, number: int) -> None:
        self.run = run
        self.number = number
        self._metrics = Tail(run.metrics)

    def steps(self) -> list[dict[str, Any]]:
        """Metrics of the steps that ended since the last call."""
        return [record for record in self._metrics.new() if record["attempt"] >= self.number]

    def status(self) -> dict[str, Any] | None:
        """What rank 0 says it is doing; None while it has said nothing."""
        try:
            status: dict[str, Any] = read_json(self.run.status)
        except (OSError, ValueError):
            return None
        return status if status["attempt"] >= self.number else None

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
