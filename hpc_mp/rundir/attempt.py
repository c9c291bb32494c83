"""One attempt of a run: its record, and readers of its files.

The record names the hosts, the address where the ranks meet, and the fencing token that distinguishes the attempt from earlier
ones. The launcher of the ranks writes it once, before they start. A requeued job has the same id and script. Ranks of an earlier
start may still run, on a node that was cut off and came back. They have another token.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc_mp.base.files import owners, read_json, render_json, write_text
from hpc_mp.base.line_file import NewLines
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.records import Evaluation, RankStatus, StepMetrics, read_record, record_of_line

TOKEN = "HPC_MP_TOKEN"  # environment variable of a rank's token
SECRET = "HPC_MP_SECRET"  # environment variable of a rank's secret, if the launcher writes no record


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """The record that ranks read when they start.

    Attributes:
        token: unique to this start of the run (on Slurm: job id, dot, restart count).
        attempt: number from 1; records of metrics.jsonl and ranks.jsonl contain it.
        hosts: the scheduler's name of each node of placement.json, in its order; empty if only the launcher of the ranks knows
            them.
        address: rank 0's host, where ranks meet; empty if only the launcher of the ranks knows it.
        port: port on that host.
        secret: shared secret by which the ranks prove to each other that they belong to this attempt.
        end: unix seconds at which the scheduler ends the job; None without a limit.
        grace: seconds before ``end`` at which ranks save and stop.
        time: unix seconds at which the attempt began, its nodes allocated; 0 in records of earlier releases.
        addresses: resolvable names of the hosts, in their order, if tasks of nodes start something on each other.
    """

    token: str
    attempt: int
    hosts: tuple[str, ...]
    address: str
    port: int
    secret: str = field(repr=False)
    end: float | None = None
    grace: float = 0.0
    time: float = 0.0
    addresses: tuple[str, ...] = ()


def write_attempt(path: Path, record: AttemptRecord) -> None:
    """Publish the record atomically, readable only by the run's owner. Raises OSError."""
    write_text(path, render_json(asdict(record)), opener=owners)


def read_attempt(path: Path) -> AttemptRecord:
    """Read the record. Raises OSError or ValueError if it is absent or broken."""
    try:
        tree = read_json(path)
        return AttemptRecord(**{**tree, "hosts": tuple(tree["hosts"]), "addresses": tuple(tree.get("addresses", ()))})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an attempt record ({error})") from None


# Lines that libraries write at every end, and stacks of native crashes: they give no reason.
NOISE = re.compile(r"\[rank\d+\]:\[W|\[W\d+ |wandb: |\s*warnings\.warn\(|.*resource_tracker|"
                   r'Extension modules: |\s+File "|Current thread |Thread 0x|\s+<no Python frame>|Fatal Python error: |'
                   r"\*\*\* (Process received signal|End of error message)|\[\S+:\d+\] (\[ ?\d+\]|Signal)")
WORRIED = re.compile(r"\b(error|fatal|failed|failure|cannot|can't|could not|unable|no such|not found|invalid|unrecognized|"
                     r"exception|assertion|denied|abort\w*)\b", re.IGNORECASE)
CALM = re.compile(r"\b(warn(ing)?|info|debug|deprecated)\b|terminate called without", re.IGNORECASE)
NEAR = 8  # last lines in which a line that mentions an error is preferred over the last line


def last_words(lines: Sequence[str]) -> str:
    """Return the last line that mentions an error, if it is near the end; else the last line with words."""
    texts: list[str] = []
    for line in reversed(lines):
        if any(map(str.isalnum, line)) and not NOISE.match(line):
            texts.append(line.strip())
            if len(texts) == NEAR:
                break
    return next((line for line in texts if WORRIED.search(line) and not CALM.search(line)), texts[0] if texts else "")


TAIL = 1 << 20  # bytes at the end of a log that are searched for its last lines: one exception may fill hundreds of KiB


def tail(path: Path, begin: int = 0) -> list[str]:
    """Return the last lines of a log, the first of them perhaps partial; empty if the file does not exist. ``begin``: offset in
    bytes before which nothing is read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - TAIL))
            return lines_of(file.read())
    except FileNotFoundError:
        return []


def lines_of(data: bytes) -> list[str]:
    """Return lines as a terminal shows them: if a progress bar overwrote its line, only the last text."""
    return [line.rstrip("\r").rpartition("\r")[2] for line in data.decode(errors="replace").split("\n")]


class AttemptReader:
    """Reader of an attempt's files, and of later attempts that Slurm makes by requeueing. Earlier attempts are skipped."""

    def __init__(self, run: RunDirectory, number: int) -> None:
        self.run = run
        self.number = number
        self._metrics = NewLines(run.metrics)
        self._evaluations = NewLines(run.evaluations)

    def steps(self) -> list[StepMetrics]:
        """Return the metrics of the steps that ended since the last call."""
        records = (record_of_line(line, StepMetrics) for line in self._metrics.read())
        return [record for record in records if record is not None and record.attempt >= self.number]

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations on held-out text made since the last call."""
        records = (record_of_line(line, Evaluation) for line in self._evaluations.read())
        return [record for record in records if record is not None and record.attempt >= self.number]

    def status(self) -> RankStatus | None:
        """Return rank 0's report of its activity; None before its first."""
        try:
            status = read_record(self.run.status, RankStatus)
        except (OSError, ValueError):
            return None
        return status if status.attempt >= self.number else None

    def last_lines(self, rank: int) -> list[str]:
        """Return the last lines of a rank's log, the first of them perhaps partial; empty if the rank has written nothing."""
        return tail(self.run.rank_log(rank))
