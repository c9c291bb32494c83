"""The logs of a run: which files there are, whose lines are in them, and the failure that ends them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import RunDirectory, read_lines

LABEL = re.compile(r" *(\d+): ")  # of srun --label: the number of the task


@dataclass(frozen=True, slots=True)
class LogSource:
    """A log file; of a node's only the lines of one task, where ``task`` is given. ``mark`` goes before each line."""

    path: Path
    task: int | None = None
    mark: str = ""

    def lines(self, text: str) -> Iterator[str]:
        for line in text.splitlines():
            label = LABEL.match(line) if self.task is not None else None
            if self.task is None or (label and int(label[1]) == self.task):
                yield self.mark + line[label.end() if label else 0:]


class Logs:
    """Of one attempt; earlier ones lie in ``attempts/K/log``.

    Raises:
        HpcMpError: there is no such attempt.
    """

    def __init__(self, run: RunDirectory, attempt: int | None) -> None:
        newest = run.attempt()
        self.run, self.attempt = run, attempt or newest
        if not 1 <= self.attempt <= newest:
            raise HpcMpError(f"--attempt {attempt}", f"there are attempts 1 to {newest}", "name one of them")
        self.files = run.of_attempt(self.attempt)
        self._ranks = {record["rank"]: record for record in read_lines(run.ranks) if record["attempt"] == self.attempt}

    def main(self) -> list[LogSource]:
        """What rank 0 and the launcher say, and what Slurm and srun say."""
        slurm = sorted(self.files.slurm_log.found(), key=lambda path: path.stat().st_mtime)
        return self._there([*slurm, self.files.srun_log, self.files.main_log])

    def rank(self, rank: int) -> list[LogSource]:
        """The rank's own file, else its lines in that of its node."""
        record = self._ranks.get(rank, {})
        by_node = LogSource(self.files.node_log(record.get("node", "")), record.get("task", rank))
        return self._there([self.files.rank_log(rank)]) or [by_node] * by_node.path.is_file()

    def node(self, node: str) -> list[LogSource]:
        """By the node's name, or its host's: its own file, else those of its ranks."""
        mine = [record for record in self._ranks.values() if node in (record["node"], record["host"])]
        found = self._there([self.files.node_log(name) for name in dict.fromkeys([node, *(each["node"] for each in mine)])])
        return found or [LogSource(source.path, mark=f"{record['rank']}: ") for record in _by_rank(mine)
                         for source in self._there([self.files.rank_log(record['rank'])])]

    def named(self, key: str) -> str:
        """The ranks or nodes (``key``) that this attempt has started, for a message."""
        return ", ".join(map(str, dict.fromkeys(record[key] for record in _by_rank(self._ranks.values())))) or "none"

    @staticmethod
    def _there(paths: Sequence[Path]) -> list[LogSource]:
        return [LogSource(path) for path in paths if path.is_file()]


def _by_rank(records: Any) -> list[Mapping[str, Any]]:
    return sorted(records, key=lambda record: int(record["rank"]))


class Follower:
    """Gives the complete lines of logs that it has not given yet."""

    def __init__(self) -> None:
        self._read: dict[tuple[LogSource, int], int] = {}  # up to where, by source and inode: another attempt, another file

    def new(self, sources: Sequence[LogSource]) -> Iterator[str]:
        for source in sources:
            try:
                with open(source.path, "rb") as file:
                    known = source, os.fstat(file.fileno()).st_ino
                    file.seek(begin := self._read.get(known, 0))
                    complete, newline, _ = file.read().rpartition(b"\n")
            except FileNotFoundError:
                continue  # it was just put away
            self._read[known] = begin + len(complete + newline)
            yield from source.lines(complete.decode(errors="replace"))
