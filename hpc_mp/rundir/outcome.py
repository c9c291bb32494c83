"""What became of a run, and the first cause when it failed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpc_mp.rundir import RunDirectory, read_json, read_lines, write_json
from hpc_mp.rundir.checkpoints import complete_steps
from hpc_mp.rundir.follow import AttemptReader

STOPPED = os.EX_TEMPFAIL  # a rank that was asked to stop and has saved

State = Literal["completed", "failed", "stopped", "submitted"]
WORSE: tuple[State, ...] = ("completed", "submitted", "stopped", "failed")  # each is worse than those before it
Kind = Literal["user", "error", "memory", "signal", "exit", "launcher", "lost", "peer", "hang"]

# Which finding is the cause when there are several; of equal ones the earliest. A peer's complaint is an echo.
PRECEDENCE: dict[Kind, int] = {"memory": 0, "user": 1, "error": 2, "signal": 2, "exit": 2, "launcher": 2, "lost": 3,
                              "peer": 4, "hang": 5}


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a run failed.

    Attributes:
        kind: "user" (the input is wrong), "error" (an exception), "signal", "exit" (a code and no word), "launcher"
            (the emulator itself), "peer" (another rank was lost, and nobody says why), "hang" (others had long ended).
        message: one sentence or, for "user", one paragraph.
        rank, node, log: who, where, and the file that says more; None when it was no rank.
        time: unix seconds.
    """

    kind: Kind
    message: str
    rank: int | None = None
    node: str | None = None
    log: str | None = None
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ``launch`` reports.

    Attributes:
        steps: how many optimizer steps the run has behind it.
        first_loss, loss: of the run's first and last step; None before the first step.
        tokens_per_s: mean over this attempt's steps without its first, which warms up.
        checkpoint: the newest one.
        report: the page that was drawn of the run; None where none was.
        elements: of an array, the outcome of each of its runs; this one is then the worst of them.
    """

    run: Path
    state: State
    job_id: str | None = None
    steps: int = 0
    first_loss: float | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    checkpoint: Path | None = None
    cause: Cause | None = None
    report: Path | None = None
    elements: tuple[Outcome, ...] = ()

    def document(self) -> dict[str, Any]:
        """For ``--json`` and ``outcome.json``. What is not finite is null: JSON knows no NaN."""
        tree = {key: _plain(value) for key, value in asdict(replace(self, elements=())).items() if key != "elements"}
        return tree | ({"elements": [each.document() for each in self.elements]} if self.elements else {})


def together(elements: Sequence[Outcome]) -> Outcome:
    """The outcome of an array: that of its worst element, with all of them beside it."""
    return replace(max(elements, key=lambda outcome: WORSE.index(outcome.state)), elements=tuple(elements))


def first(causes: Iterable[Cause]) -> Cause | None:
    """The cause among many findings; None when there are none."""
    return min(causes, key=lambda cause: (PRECEDENCE[cause.kind], cause.time), default=None)


def reported(failure: Mapping[str, Any], attempt: AttemptReader) -> Cause:
    """What a rank wrote about its own end."""
    kind, rank, node, said = (failure[key] for key in ("kind", "rank", "node", "message"))
    message = {
        "user": said,
        "error": f"rank {rank} on {node} failed: {said}",
        "memory": f"rank {rank} on {node} ran out of memory: {said}",
        "lost": f"rank {rank} on {node}: {said}",
        "peer": f"rank {rank} on {node} lost another rank: {said}",
        "hang": f"rank {rank} on {node} made no progress: {said}",
    }[kind]
    return Cause(kind, message, rank, node, str(attempt.run.rank_log(rank)), failure["time"])


def written(attempt: AttemptReader) -> tuple[State, Cause | None] | None:
    """How the run ended in the words of whoever saw it end (``outcome.json``); None while nobody has."""
    try:
        tree = read_json(attempt.run.outcome)
    except (OSError, ValueError):
        return None
    if tree["attempt"] < attempt.number:
        return None
    return tree["state"], Cause(**tree["cause"]) if tree["cause"] else None


def note_report(run: RunDirectory, report: Path) -> None:
    """Write into ``outcome.json`` where the report of the run lies, where somebody has written how the run ended."""
    path = run.outcome
    with suppress(OSError, ValueError):
        write_json(path, read_json(path) | {"report": str(report)})


def finished(run: RunDirectory) -> Outcome:
    """Of a run to which there is nothing to add."""
    return Outcome(run.path, "completed", **figures(AttemptReader(run, run.attempt())))


def figures(attempt: AttemptReader) -> dict[str, Any]:
    """The part of an ``Outcome`` that lies in the run directory."""
    run = attempt.run
    records = read_lines(run.metrics)
    warm = [record for record in records if record["attempt"] >= attempt.number][1:]
    seconds = sum(record["step_time_s"] for record in warm)
    tokens = sum(record["tokens_per_s"] * record["step_time_s"] for record in warm)
    return {
        "steps": records[-1]["step"] if records else 0,
        "first_loss": records[0]["loss"] if records else None,
        "loss": records[-1]["loss"] if records else None,
        "tokens_per_s": tokens / seconds if seconds else None,
        "checkpoint": next(reversed(complete_steps(run.checkpoints)), None),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
