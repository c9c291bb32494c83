"""Retention of a run's checkpoints: the newest ones, and the best one by ``evaluate.best`` on held-out text, are kept.

A run resumes from the newest. A user exports the best in the end; a run that overfits passes it long before its last step.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_mp.rundir.checkpoints import complete_steps, step_of
from hpc_mp.rundir.layout import STEP, RunDirectory
from hpc_mp.rundir.records import Evaluation, read_records


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The best checkpoint on held-out text, among existing ones that were evaluated at their step."""

    path: Path
    evaluation: Evaluation


def comparable(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations on the same text as the newest, by its criterion. A resume may change ``evaluate.files``; losses on
    another text, recognized by its number of tokens, are not comparable."""
    return [evaluation for evaluation in _on_one_text(evaluations) if math.isfinite(evaluation.cost)]


def _on_one_text(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    return [replace(evaluation, criterion=evaluations[-1].criterion) for evaluation in evaluations
            if evaluation.label_tokens == evaluations[-1].label_tokens]


def best_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the best evaluation, and the first of equal ones, even if its step has no checkpoint; None without any."""
    return min(comparable(evaluations), key=lambda evaluation: evaluation.cost, default=None)


def exhausted(evaluations: Sequence[Evaluation], patience: int, gain: float, criterion: str) -> bool:
    """Return True if each of the newest ``patience`` evaluations on the same text is not better by ``gain`` than the best one
    before, by ``evaluate.best``. A loss that is not finite is no gain."""
    least, waited = math.inf, 0
    for cost in (replace(evaluation, criterion=criterion).cost for evaluation in _on_one_text(evaluations)):
        waited = 0 if cost < least - gain else waited + 1
        least = min(least, cost) if math.isfinite(cost) else least
    return patience > 0 and waited >= patience


def best_checkpoint(run: RunDirectory) -> BestCheckpoint | None:
    """Return the best checkpoint; None if no existing checkpoint was evaluated. Raises OSError."""
    saved = complete_steps(run.checkpoints)
    evaluated = {evaluation.step: evaluation for evaluation in comparable(read_records(run.evaluations, Evaluation))}
    checkpoints = [BestCheckpoint(path, evaluated[step_of(path)]) for path in saved if step_of(path) in evaluated]
    return min(checkpoints, key=lambda checkpoint: checkpoint.evaluation.cost, default=None)


def surplus(run: RunDirectory, keep: int) -> list[Path]:
    """Return the checkpoints beyond the newest ``keep`` (at least 1) and the best one, oldest first. Raises OSError."""
    best = best_checkpoint(run)
    return [path for path in complete_steps(run.checkpoints)[:-keep] if best is None or path != best.path]


def leftovers(run: RunDirectory) -> list[Path]:
    """Return the remains of crashed saves, which have temporary names."""
    return sorted(run.checkpoints.glob(f".{STEP}*"))


def prune(run: RunDirectory, keep: int) -> None:
    """Delete the surplus and the leftovers. Anything that cannot be read or deleted stays until the next save."""
    try:
        gone = [*surplus(run, keep), *leftovers(run)]
    except OSError:  # evaluations.jsonl is not readable, so the best checkpoint is unknown
        return
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
