"""One attempt of a run: its record, and what it writes, read while it runs.

The record says which hosts take part, where the ranks meet, and the fencing token that tells the attempt from earlier ones. It is
written once by whoever starts ranks, before they start. A requeued job has the same id and script; ranks of its earlier
start may live on, on a node that was cut off and came back. They carry another token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc_mp.base.files import owners, read_json, render_json, write_text
from hpc_mp.base.line_file import NewLines
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.records import Evaluation, RankStatus, StepMetrics, read_record, record_of_line

TOKEN = "HPC_MP_TOKEN"  # the environment variable in which a rank carries its token
SECRET = "HPC_MP_SECRET"  # and the one in which ranks of a launcher that writes no record carry their secret


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """What ranks read when they start.

    Attributes:
        token: unlike that of any other start of this run (on Slurm: job id, dot, restart count).
        attempt: from 1; records of metrics.jsonl and ranks.jsonl carry it.
        hosts: the scheduler's name of each node of placement.json, in its order; none where only what starts ranks knows them.
        address: where ranks meet: rank 0's host; empty where only that knows it.
        port: on that host.
        secret: what ranks know and nobody else on the network: they prove with it that they belong together.
        end: unix seconds at which the scheduler ends the job; None without a limit.
        grace: seconds before ``end`` at which ranks save and stop.
        time: unix seconds at which the attempt began, its nodes allocated; 0 in records of earlier releases.
        addresses: names of the hosts that can be resolved, in their order, where tasks of nodes start something on each other.
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
    """Publish it atomically, for the eyes of the run's owner. Raises OSError."""
    write_text(path, render_json(asdict(record)), opener=owners)


def read_attempt(path: Path) -> AttemptRecord:
    """Raises OSError or ValueError when it is absent or broken."""
    try:
        tree = read_json(path)
        return AttemptRecord(**{**tree, "hosts": tuple(tree["hosts"]), "addresses": tuple(tree.get("addresses", ()))})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of an attempt ({error})") from None


# What libraries say of every end, and stacks of native crashes: no reason of one.
NOISE = re.compile(r"\[rank\d+\]:\[W|\[W\d+ |wandb: |\s*warnings\.warn\(|.*resource_tracker|"
                   r'Extension modules: |\s+File "|Current thread |Thread 0x|\s+<no Python frame>|Fatal Python error: |'
                   r"\*\*\* (Process received signal|End of error message)|\[\S+:\d+\] (\[ ?\d+\]|Signal)")
WORRIED = re.compile(r"\b(error|fatal|failed|failure|cannot|can't|could not|unable|no such|not found|invalid|unrecognized|"
                     r"exception|assertion|denied|abort\w*)\b", re.IGNORECASE)
CALM = re.compile(r"\b(warn(ing)?|info|debug|deprecated)\b|terminate called without", re.IGNORECASE)
NEAR = 8  # lines from the end on in which one that speaks of an error tells more than the last


def last_words(lines: Sequence[str]) -> str:
    """Of these lines the last that speaks of an error near the end, else the last that is more than a rule of dashes."""
    said: list[str] = []
    for line in reversed(lines):
        if any(map(str.isalnum, line)) and not NOISE.match(line):
            said.append(line.strip())
            if len(said) == NEAR:
                break
    return next((line for line in said if WORRIED.search(line) and not CALM.search(line)), said[0] if said else "")


TAIL = 1 << 20  # bytes of a log in which its last lines are looked for: one exception may fill hundreds of KiB


def tail(path: Path, begin: int = 0) -> list[str]:
    """The last lines of a log, the first of them perhaps in part; none where there is none.

    Args:
        begin: byte before which nothing is read.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - TAIL))
            return lines_of(file.read())
    except FileNotFoundError:
        return []


def lines_of(data: bytes) -> list[str]:
    """Lines as a terminal shows them: of what a progress bar has written over itself, the last."""
    return [line.rstrip("\r").rpartition("\r")[2] for line in data.decode(errors="replace").split("\n")]


class AttemptReader:
    """The files of an attempt, and of those that Slurm makes of it by queueing the job again; earlier ones are passed over."""

    def __init__(self, run: RunDirectory, number: int) -> None:
        self.run = run
        self.number = number
        self._metrics = NewLines(run.metrics)
        self._evaluations = NewLines(run.evaluations)

    def steps(self) -> list[StepMetrics]:
        """Metrics of the steps that ended since the last call."""
        records = (record_of_line(line, StepMetrics) for line in self._metrics.read())
        return [record for record in records if record is not None and record.attempt >= self.number]

    def evaluations(self) -> list[Evaluation]:
        """On held-out text, those made since the last call."""
        records = (record_of_line(line, Evaluation) for line in self._evaluations.read())
        return [record for record in records if record is not None and record.attempt >= self.number]

    def status(self) -> RankStatus | None:
        """What rank 0 says it is doing; None while it has said nothing."""
        try:
            status = read_record(self.run.status, RankStatus)
        except (OSError, ValueError):
            return None
        return status if status.attempt >= self.number else None

    def last_lines(self, rank: int) -> list[str]:
        """The last lines in the log of a rank, the first of them perhaps in part; none when it has said nothing."""
        return tail(self.run.rank_log(rank))
