"""Which checkpoints of a run stay: the newest ones, and the best one by its loss on held-out text.

The newest are what a run goes on from. The best is what a user wants to export in the end, and a run that learns its text by
heart leaves it behind long before its last step.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.rundir.checkpoints import complete_steps, step_of
from hpc_mp.rundir.layout import STEP, RunDirectory
from hpc_mp.rundir.records import Evaluation, read_records


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The checkpoint with the least loss on held-out text, of those that are there and were evaluated at their step."""

    path: Path
    step: int
    loss: float


def comparable(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Those that have a loss, on the text of the newest one: a resume may change ``evaluate.files``, and what was measured on
    another text, which is seen by its number of tokens, is neither better nor worse."""
    return [each for each in evaluations if math.isfinite(each.loss) and each.label_tokens == evaluations[-1].label_tokens]


def best_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The one with the least loss, whether or not there is a checkpoint of its step; None without any. Of equals the first."""
    return min(comparable(evaluations), key=lambda each: each.loss, default=None)


def best_checkpoint(run: RunDirectory) -> BestCheckpoint | None:
    """None where no checkpoint that is there was evaluated. Raises OSError."""
    saved = complete_steps(run.checkpoints)
    evaluated = {each.step: each.loss for each in comparable(read_records(run.evaluations, Evaluation))}
    found = [BestCheckpoint(path, step_of(path), evaluated[step_of(path)]) for path in saved if step_of(path) in evaluated]
    return min(found, key=lambda each: each.loss, default=None)


def surplus(run: RunDirectory, keep: int) -> list[Path]:
    """The checkpoints beyond the newest ``keep`` (at least 1) and the best one, oldest first. Raises OSError."""
    best = best_checkpoint(run)
    return [path for path in complete_steps(run.checkpoints)[:-keep] if best is None or path != best.path]


def leftovers(run: RunDirectory) -> list[Path]:
    """What saves that crashed have left, under temporary names."""
    return sorted(run.checkpoints.glob(f".{STEP}*"))


def prune(run: RunDirectory, keep: int) -> None:
    """Delete the surplus and the leftovers. What cannot be read or deleted stays until the next save."""
    try:
        gone = [*surplus(run, keep), *leftovers(run)]
    except OSError:  # evaluations.jsonl does not answer: nobody knows which checkpoint is the best
        return
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
