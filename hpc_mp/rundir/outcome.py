"""The verdict: the end of an attempt of a run, and the reason of a failure. Once written to ``outcome.json``, it is final."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from hpc_mp.rundir import RunDirectory, read_json, write_json
from hpc_mp.rundir.checkpoints import complete_steps
from hpc_mp.rundir.records import Evaluation, StepMetrics, losses, read_records
from hpc_mp.rundir.retention import best_checkpoint, best_evaluation

STOPPED = os.EX_TEMPFAIL  # exit code of a rank that was asked to stop and has saved

State = Literal["completed", "failed", "stopped", "submitted"]
OF_ARRAY = ("elements", "not_started")  # fields of an array's outcome alone
WORSE: tuple[State, ...] = ("completed", "submitted", "stopped", "failed")  # each state is worse than those before it


@dataclass(frozen=True, slots=True)
class Cause:
    """The reason why a run failed.

    Attributes:
        kind: a key of ``failures.KINDS``.
        message: one sentence or, for "user", one paragraph.
        rank, node: the failed rank and its node; None if it was not a rank.
        log: the file with more details; None without one.
        time: unix seconds.
        nodes: nodes to blame, which later attempts leave out.
        retry: True if another attempt may succeed.
    """

    kind: str
    message: str
    rank: int | None = None
    node: str | None = None
    log: str | None = None
    time: float = 0.0
    nodes: tuple[str, ...] = ()
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run.

    Attributes:
        steps: number of optimizer steps done.
        first_step: number of the first step with a loss, 0 before it; above 1 for a run that continued from another run's
            state.
        first_loss, loss: loss of the first and the last step of the run that have one; None before the first.
        evaluation_loss: loss of the newest evaluation on held-out text; None without one. best_evaluation_loss: of the best.
        tokens_per_s: mean over this attempt's steps, without the first, which warms up.
        checkpoint: the newest one. best_checkpoint: the best evaluated one, by ``evaluate.best``.
        report: the HTML report of the run; None without one.
        elements: for an array, the outcome of each of its runs; this outcome is then the worst. not_started: number of its runs
            that were never started.
    """

    run: Path
    state: State
    job_id: str | None = None
    steps: int = 0
    first_step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    evaluation_loss: float | None = None
    best_evaluation_loss: float | None = None
    tokens_per_s: float | None = None
    checkpoint: Path | None = None
    best_checkpoint: Path | None = None
    cause: Cause | None = None
    report: Path | None = None
    elements: "tuple[Outcome, ...]" = ()
    not_started: int = 0

    def document(self) -> dict[str, Any]:
        """Return the document for ``--json`` and ``outcome.json``. Numbers that are not finite become null: JSON has no NaN."""
        tree = {key: _plain(value) for key, value in asdict(replace(self, elements=())).items() if key not in OF_ARRAY}
        return tree | ({"elements": [element.document() for element in self.elements], "not_started": self.not_started}
                       if self.elements else {})


def together(elements: Sequence[Outcome]) -> Outcome:
    """Return the outcome of an array: that of its worst element, with all elements attached."""
    return replace(max(elements, key=lambda outcome: WORSE.index(outcome.state)), elements=tuple(elements))


def write_outcome(outcome: Outcome, attempt: int) -> None:
    """Write ``outcome.json``. Raises OSError."""
    write_json(RunDirectory(outcome.run).outcome, outcome.document() | {"attempt": attempt})


def read_verdict(run: RunDirectory, attempt: int | None = None) -> Outcome | None:
    """Return the verdict on an attempt, by default the current one; None before it exists. Raises ValueError if it is broken."""
    number = run.attempt() if attempt is None else attempt
    try:
        tree = read_json(run.of_attempt(number).outcome)
    except OSError:
        return None
    try:
        plain = {field.name: tree[field.name] for field in fields(Outcome) if field.name in tree and field.name not in OF_ARRAY}
        paths = {name: Path(tree[name]) for name in ("checkpoint", "best_checkpoint", "report") if tree.get(name)}
        outcome = Outcome(**plain | paths | {"run": run.path, "cause": _cause(tree["cause"]) if tree.get("cause") else None})
        return outcome if int(tree.get("attempt") or number) == number else None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a verdict ({error})") from None


def verdict(run: RunDirectory, attempt: int | None = None) -> Outcome | None:
    """Return the same as ``read_verdict``, but None for a broken verdict."""
    try:
        return read_verdict(run, attempt)
    except ValueError:
        return None


def figures(run: RunDirectory, attempt: int) -> dict[str, Any]:
    """Return the fields of an ``Outcome`` that the run directory determines. ``attempt``: the first attempt in the throughput."""
    records = read_records(run.metrics, StepMetrics)
    evaluations = read_records(run.evaluations, Evaluation)
    least, best = best_evaluation(evaluations), best_checkpoint(run)
    warm = [record for record in records if record.attempt >= attempt][1:]
    seconds = sum(record.step_time_s for record in warm)
    tokens = sum(record.tokens_per_s * record.step_time_s for record in warm)
    return {
        "steps": records[-1].step if records else 0,
        "first_step": next((record.step for record in records if math.isfinite(record.loss)), 0),
        "first_loss": next(iter(losses(records)), None),
        "loss": next(reversed(losses(records)), None),
        "evaluation_loss": evaluations[-1].loss if evaluations else None,
        "best_evaluation_loss": least.loss if least else None,
        "tokens_per_s": tokens / seconds if seconds else None,
        "checkpoint": next(reversed(complete_steps(run.checkpoints)), None),
        "best_checkpoint": best.path if best else None,
    }


def _cause(tree: Mapping[str, Any] | str) -> Cause:
    if isinstance(tree, str):
        return Cause("unknown", tree)
    names = {field.name for field in fields(Cause)}
    return Cause(**{"kind": "unknown", **{key: value for key, value in tree.items() if key in names}})


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
