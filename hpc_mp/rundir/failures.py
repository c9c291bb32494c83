"""Why ranks ended: one record per rank.

When one rank dies or stands still, the others lose it, wait for it in vain, and are ended: most of what is written then is an
echo. ``KINDS`` holds all kinds of failure, those that bring others about before those that are brought about, and the
consequences of each. The cause is found in ``hpc_mp.diagnosis``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_mp.base.files import read_json, read_lines, write_json
from hpc_mp.layout.placement import RankPlace
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.standings import Standing, standing_of


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Attributes:
    level: what brings others about is lower; of equal ones the earliest failure is the cause.
    text: what a rank, task, node or job of which it is found has done; empty where the message says it itself.
    retry: another attempt may go well: a fault of the machine, or one that nobody can tell from it.
    blame_node: the node of which it is found should be left out then.
    """

    level: int
    text: str = ""
    retry: bool = False
    blame_node: bool = False

    @property
    def echo(self) -> bool:
        """Whether another rank's end or stand may have brought it about."""
        return self.level >= ECHO


ECHO = 10  # the level from which on another rank's end or stand may have brought a failure about
KINDS: dict[str, FailureKind] = {
    "memory": FailureKind(0, "ran out of memory"),
    "hardware": FailureKind(1, "has a hardware fault", retry=True, blame_node=True),
    "node": FailureKind(2, "failed, says Slurm", retry=True, blame_node=True),
    "orphaned": FailureKind(2, "lost the slurmstepd that had started it", retry=True, blame_node=True),
    "unfit": FailureKind(3, "is not fit for this run", retry=True, blame_node=True),
    "unwritable": FailureKind(3, "could not write checkpoints, and other nodes could", retry=True, blame_node=True),
    "user": FailureKind(4, "refused its input"),
    "error": FailureKind(5, "failed"),
    "removed": FailureKind(5),
    "space": FailureKind(5, "found no space"),
    "storage": FailureKind(5, "had an error of its file system", retry=True),
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
BY_SOMEBODY = frozenset({-1, -2, -10, -12, -15})  # HUP, INT, USR1, USR2, TERM
BY_A_LIMIT = frozenset({-24, -25})  # on CPU time and file size: it would be met again
BY_ITSELF = frozenset({-4, -6, -8, -11})  # what code does to itself: ILL, ABRT, FPE, SEGV

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0e-\x1b\x7f]")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The end of one rank, as it wrote it down itself or, if it could not, as whoever saw it end did.

    Attributes:
        node: the scheduler's name; ``host``: the machine's own.
        kind: a key of ``KINDS``.
        message: what it was, without who.
        time: unix seconds.
        attempt: from 1.
        place: its coordinates, ``(("dp", 0), …)``; empty when nobody has noted them.
        traceback: of a Python error; may be empty.
        nodes: those that it found lost; ``silent``: their beats stopped, else connections broke; ``ambiguous``: this node
            may be the lost one as well.
        standing: where it stood; None: nobody knows.
        of_node: whether it is the one command of a node, which numbers its ranks itself.
        inner: which of those it says has failed; None where it says nothing of that.
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
    ambiguous: bool = False
    standing: Standing | None = None
    of_node: bool = False
    inner: int | None = None

    def __str__(self) -> str:
        """The one wording: who, where, did what, and why. What is wrong with an input is said to whoever wrote it."""
        if self.kind == "user":
            return one_line(self.message)
        return sentence(f"node {self.node}" if self.of_node else who(self.rank, self.place, self.node), self.kind, self.message)


YEAR_3000 = 32_503_680_000  # unix seconds: what calendars can show
AXES = ("dp", "pp", "cp", "tp")


def coordinates(place: RankPlace) -> tuple[tuple[str, int], ...]:
    """Of a rank on all axes, as records hold them."""
    return tuple((axis, getattr(place, axis)) for axis in AXES)


def who(rank: int, place: Iterable[tuple[str, int]] = (), node: str | None = None) -> str:
    """``rank 3 (dp 0, pp 1, tp 1) on n2``."""
    shown = ", ".join(f"{axis} {at}" for axis, at in place if axis != "cp" or at)
    return f"rank {rank}" + (f" ({shown})" if shown else "") + (f" on {node}" if node else "")


def sentence(subject: str, kind: str, message: str) -> str:
    """What has failed, what it has done, and the evidence."""
    text, said = KINDS[kind].text, one_line(message)
    return " ".join(filter(None, (subject, text and f"{text}:" if said else text, said)))


def one_line(message: str) -> str:
    """A message of several lines, as CUDA's are, in one, without colours and the like: it is the last line of logs."""
    plain = CONTROL.sub("", message)
    return " ".join(line.strip() for line in plain.splitlines() if line.strip())


def precedence(kind: str, time: float) -> tuple[int, float]:
    """By which the cause comes first among failures; ``time``: unix seconds, infinite where it is not known."""
    return KINDS[kind].level, time


def kind_of_end(code: int, program: bool = False) -> str:
    """The kind of failure of a process that ended without a word; ``code`` as ``subprocess`` gives it.

    Args:
        program: whether it is somebody's program: a crash in its own native code, which in our engine speaks of the machine, is
            then the program's.
    """
    if program and code in BY_ITSELF:
        return "crash"
    return "exit" if code >= 0 or code in BY_A_LIMIT else "ended" if code in BY_SOMEBODY else "signal"


def write_failure(run: RunDirectory, failure: RankFailure) -> None:
    """Raises OSError."""
    tree = asdict(failure)
    del tree["place"]
    write_json(run.failure(failure.attempt, failure.rank), tree | dict(failure.place))


def read_failure(path: Path) -> RankFailure:
    """Raises OSError or ValueError when it is absent or broken."""
    tree = read_json(path)
    try:
        standing = tree.get("standing")
        found = RankFailure(
            int(tree["rank"]), str(tree["node"]), tree["kind"] if tree["kind"] in KINDS else "error", str(tree["message"]),
            float(tree["time"]), int(tree.get("attempt", 1)), str(tree.get("host", tree["node"])), int(tree.get("pid", 0)),
            tuple((axis, int(tree[axis])) for axis in AXES if axis in tree), str(tree.get("traceback", "")),
            tuple(map(str, tree.get("nodes", ()))), bool(tree.get("silent")), bool(tree.get("ambiguous")),
            standing_of(standing) if standing else None, bool(tree.get("of_node")),
            int(tree["inner"]) if tree.get("inner") is not None else None)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no record of a rank's end ({error})") from None
    if not 0 <= found.time < YEAR_3000:
        raise ValueError(f"no record of a rank's end (time = {found.time})")
    return found


def read_failures(run: RunDirectory, attempt: int | None = None) -> list[RankFailure]:
    """Of all ranks whose end is known, by rank; ``attempt``: None for all attempts.

    What is broken is left out, and so is the end of a rank that has begun anew since in the same attempt.
    """
    begun = {(line["attempt"], line["rank"]): line for line in announced(run)}
    found = []
    for path in run.failure.found(*(() if attempt is None else (attempt,))):
        with suppress(OSError, ValueError, TypeError):
            failure = read_failure(path)
            start = begun.get((failure.attempt, failure.rank), {})
            if failure.time >= float(start.get("time", 0)):
                known = failure.place or tuple((axis, int(start[axis])) for axis in AXES if axis in start)
                found.append(replace(failure, place=known))
    return found


def announced(run: RunDirectory) -> list[dict[str, Any]]:
    """The lines of ``ranks.jsonl`` that tell of a rank of an attempt."""
    with suppress(OSError):
        return [line for line in read_lines(run.ranks) if isinstance(line, dict)
                and isinstance(line.get("attempt"), int) and isinstance(line.get("rank"), int)]
    return []
