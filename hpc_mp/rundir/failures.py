"""Why the ranks of an attempt ended, in their own words, and which of them is the cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_mp.rundir import RunDirectory, read_json, read_lines

# Which record is the cause when there are several; of equal ones the earliest. What another's end brings about is last.
PRECEDENCE = {"user": 0, "memory": 0, "error": 1, "lost": 2, "hang": 3, "peer": 4}
WORDS = {"user": "refused its input", "memory": "ran out of memory", "error": "failed", "lost": "lost a node",
         "hang": "saw no step end in time", "peer": "lost another rank"}
AXES = ("dp", "pp", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one rank.

    Attributes:
        node: the scheduler's name; ``host``: the machine's own.
        kind: see ``WORDS``.
        place: its coordinates, ``(("dp", 0), …)``; empty when nobody has noted them.
        traceback: of the Python error; may be empty.
        time: unix seconds.
    """

    rank: int
    node: str
    host: str
    kind: str
    message: str
    place: tuple[tuple[str, int], ...]
    traceback: str
    time: float

    def __str__(self) -> str:
        where = f"{self.node} ({self.host})" if self.host != self.node else self.node
        place = f" [{', '.join(f'{axis} {at}' for axis, at in self.place)}]" if self.place else ""
        return f"rank {self.rank}{place} on {where} {WORDS.get(self.kind, 'failed')}: {self.message}"


def failures(run: RunDirectory, attempt: int) -> list[Failure]:
    """Of all ranks that have said why they ended; the cause comes first."""
    places = {record["rank"]: record for record in read_lines(run.ranks) if record["attempt"] == attempt}
    found = []
    for path in run.failure.found(attempt):
        try:
            record = read_json(path)
        except (OSError, ValueError):
            continue  # the rank was killed while it wrote
        found.append(_failure({**places.get(record["rank"], {}), **record}))
    return sorted(found, key=lambda failure: (PRECEDENCE.get(failure.kind, 1), failure.time))


def _failure(record: Mapping[str, Any]) -> Failure:
    return Failure(record["rank"], record["node"], record.get("host", record["node"]), record["kind"], record["message"],
                   tuple((axis, record[axis]) for axis in AXES if axis in record), record.get("traceback", ""),
                   record["time"])
