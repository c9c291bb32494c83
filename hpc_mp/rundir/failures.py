"""Failures of ranks: one record per rank.

If a rank dies or stalls, the others lose it, wait for it in vain, and are ended. Most of the records are then echoes. ``KINDS``
contains all kinds of failure, causes before consequences, with the reaction to each. ``hpc_mp.diagnosis`` finds the cause.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_mp.base.files import read_json, read_lines, render_json, write_json
from hpc_mp.layout.placement import RankPlace
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.standings import Standing, standing_of


@dataclass(frozen=True, slots=True)
class FailureKind:
    """A kind of failure. ``level``: precedence: causes have lower levels than their consequences; at equal levels the earliest
    failure is the cause."""

    level: int
    text: str = ""
    retry: bool = False
    blame_node: bool = False

    @property
    def echo(self) -> bool:
        """True if the end or stall of another rank may have caused it."""
        return self.level >= ECHO


ECHO = 10  # level from which the end or stall of another rank may have caused a failure
KINDS: dict[str, FailureKind] = {
    "memory": FailureKind(0, "ran out of memory"),
    "hardware": FailureKind(1, "has a hardware fault", retry=True, blame_node=True),
    "node": FailureKind(2, "failed according to Slurm", retry=True, blame_node=True),
    "orphaned": FailureKind(2, "lost the slurmstepd that had started it", retry=True, blame_node=True),
    "unfit": FailureKind(3, "is unfit for this run", retry=True, blame_node=True),
    "unwritable": FailureKind(3, "could not write checkpoints, but other nodes could", retry=True, blame_node=True),
    "user": FailureKind(4, "refused its input"),
    "error": FailureKind(5, "failed"),
    "removed": FailureKind(5),
    "space": FailureKind(5, "ran out of disk space"),
    "storage": FailureKind(5, "had a file system error", retry=True),
    "crash": FailureKind(5),
    "signal": FailureKind(5, retry=True),
    "exit": FailureKind(5),
    "ended": FailureKind(6, retry=True),
    "launcher": FailureKind(7),
    "cancelled": FailureKind(8, "was ended by Slurm", retry=True),
    "supervisor": FailureKind(8, retry=True),
    "early": FailureKind(ECHO - 1, "ended before the others"),
    "lost": FailureKind(ECHO, "lost contact", retry=True, blame_node=True),
    "hang": FailureKind(ECHO + 1, "made no progress", retry=True),
    "silent": FailureKind(ECHO + 2, "gave no sign of life", retry=True),
    "straggled": FailureKind(ECHO + 3, "did not end with the others", retry=True),
    "network": FailureKind(ECHO + 4, "had a network error", retry=True),
    "peer": FailureKind(ECHO + 5, "lost another rank", retry=True),
    "vanished": FailureKind(ECHO + 6, retry=True),
    "unknown": FailureKind(ECHO + 7),
}
BY_SOMEBODY = frozenset({-1, -2, -10, -12, -15})  # signals sent on purpose: HUP, INT, USR1, USR2, TERM
BY_A_LIMIT = frozenset({-24, -25})  # limits on CPU time and file size: another attempt would hit them again
BY_ITSELF = frozenset({-4, -6, -8, -11})  # signals that code causes itself: ILL, ABRT, FPE, SEGV

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0e-\x1b\x7f]")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The end of one rank, recorded by itself or, failing that, by the process that saw it end.

    Attributes:
        node: the scheduler's name; ``host``: the machine's own.
        kind: a key of ``KINDS``.
        message: description of the failure without its subject.
        time: unix seconds.
        attempt: from 1.
        place: the rank's coordinates, ``(("dp", 0), …)``; empty if not recorded.
        traceback: traceback of a Python error; may be empty.
        nodes: nodes that the rank found lost; ``silent``: their heartbeats stopped, else connections broke.
        standing: state in which it stalled; None if unknown.
        of_node: True if it is the one command of a node, which numbers its ranks itself.
        inner: the failed rank that this command reports; None without one.
    """

    rank: int
    node: str
    kind: str
    message: str
    time: float
    attempt: int = 1
    host: str = ""
    pid: int = 0
    place: tuple[tuple[str, int], ...] = ()
    traceback: str = ""
    nodes: tuple[str, ...] = ()
    silent: bool = False
    standing: Standing | None = None
    of_node: bool = False
    inner: int | None = None

    def __str__(self) -> str:
        """Return the standard wording: rank, node, failure and reason. For an input error, return only the message."""
        if self.kind == "user":
            return one_line(self.message)
        return sentence(f"node {self.node}" if self.of_node else who(self.rank, self.place, self.node), self.kind, self.message)


YEAR_3000 = 32_503_680_000  # unix seconds; calendars can show no later times
AXES = ("dp", "pp", "cp", "tp")


def coordinates(place: RankPlace) -> tuple[tuple[str, int], ...]:
    """Return a rank's coordinates on all axes, in the form of the records."""
    return tuple((axis, getattr(place, axis)) for axis in AXES)


def who(rank: int, place: Iterable[tuple[str, int]] = (), node: str | None = None) -> str:
    """Return a rank in words: ``rank 3 (dp 0, pp 1, tp 1) on n2``."""
    shown = ", ".join(f"{axis} {at}" for axis, at in place if axis != "cp" or at)
    return f"rank {rank}" + (f" ({shown})" if shown else "") + (f" on {node}" if node else "")


def sentence(subject: str, kind: str, message: str) -> str:
    """Return a sentence that states the subject, the failure, and the evidence."""
    text, detail = KINDS[kind].text, one_line(message)
    return " ".join(filter(None, (subject, text and f"{text}:" if detail else text, detail)))


def one_line(message: str) -> str:
    """Return a message of several lines, such as CUDA's, as one line without control sequences, for the last line of a log."""
    plain = CONTROL.sub("", message)
    return " ".join(line.strip() for line in plain.splitlines() if line.strip())


def precedence(kind: str, time: float) -> tuple[int, float]:
    """Return the sort key by which the cause is first among failures. ``time``: unix seconds, infinite if unknown."""
    return KINDS[kind].level, time


def kind_of_end(code: int, program: bool = False) -> str:
    """Return the kind of failure of a process that ended without a message. ``code``: as from ``subprocess``. ``program``: True
    for the user's program. A crash in native code then counts as the program's fault; in our engine it indicates a fault of the
    machine."""
    if program and code in BY_ITSELF:
        return "crash"
    return "exit" if code >= 0 or code in BY_A_LIMIT else "ended" if code in BY_SOMEBODY else "signal"


def write_failure(run: RunDirectory, failure: RankFailure) -> None:
    """Write the record of a failure. Raises OSError."""
    tree = asdict(failure)
    del tree["place"]
    write_json(run.failure(failure.attempt, failure.rank), tree | dict(failure.place))


def write_end(run: RunDirectory, launch: int, failure: RankFailure, code: int) -> None:
    """Write the failure of a task of a script's launch, unless a process of the task has done so. Raises OSError. ``code``: exit
    code as from ``subprocess``."""
    with suppress(FileExistsError), open(run.task_end(launch, failure.rank), "x", encoding="utf-8") as file:
        file.write(render_json(asdict(failure) | {"code": code}))


def read_ends(run: RunDirectory) -> list[tuple[int, int, RankFailure]]:
    """Return the failures of tasks of a script's launches, as (number of the launch, exit code, failure), by time."""
    ends = []
    for path in run.task_end.found():
        with suppress(OSError, ValueError, KeyError):
            ends.append((int(run.task_end.values(path)[0]), int(read_json(path)["code"]), read_failure(path)))
    return sorted(ends, key=lambda end: end[2].time)


def read_failure(path: Path) -> RankFailure:
    """Read the record of a failure. Raises OSError or ValueError if it is absent or broken."""
    tree = read_json(path)
    try:
        standing = tree.get("standing")
        failure = RankFailure(
            int(tree["rank"]), str(tree["node"]), tree["kind"] if tree["kind"] in KINDS else "error", str(tree["message"]),
            float(tree["time"]), int(tree.get("attempt", 1)), str(tree.get("host", tree["node"])), int(tree.get("pid", 0)),
            tuple((axis, int(tree[axis])) for axis in AXES if axis in tree), str(tree.get("traceback", "")),
            tuple(map(str, tree.get("nodes", ()))), bool(tree.get("silent")),
            standing_of(standing) if standing else None, bool(tree.get("of_node")),
            int(tree["inner"]) if tree.get("inner") is not None else None)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a record of a rank's end ({error})") from None
    if not 0 <= failure.time < YEAR_3000:
        raise ValueError(f"not a record of a rank's end (time = {failure.time})")
    return failure


def read_failures(run: RunDirectory, attempt: int | None = None) -> list[RankFailure]:
    """Return the failures of all ranks whose end is known, by rank. ``attempt``: None for all attempts. Broken records are left
    out. So is the end of a rank that has since started again in the same attempt."""
    begun = {(line["attempt"], line["rank"]): line for line in announced(run)}
    failures = []
    for path in run.failure.found(*(() if attempt is None else (attempt,))):
        with suppress(OSError, ValueError, TypeError):
            failure = read_failure(path)
            start = begun.get((failure.attempt, failure.rank), {})
            if failure.time >= float(start.get("time", 0)):
                place = failure.place or tuple((axis, int(start[axis])) for axis in AXES if axis in start)
                failures.append(replace(failure, place=place))
    return failures


def announced(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the lines of ``ranks.jsonl`` that announce a rank of an attempt."""
    with suppress(OSError):
        return [line for line in read_lines(run.ranks) if isinstance(line, dict)
                and isinstance(line.get("attempt"), int) and isinstance(line.get("rank"), int)]
    return []
