"""Which checkpoints stay: the newest ones and the best one by evaluation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.checkpoints import checkpoint_name
from hpc_mp.rundir.outcome import figures
from hpc_mp.rundir.records import Evaluation, line_of
from hpc_mp.rundir.retention import best_checkpoint, best_evaluation, prune


def saved(path: Path, steps: range, *evaluations: tuple[int, float, int]) -> RunDirectory:
    run = RunDirectory(path)
    for step in steps:
        (run.checkpoints / checkpoint_name(step)).mkdir(parents=True)
    (run.checkpoints / ".step-00000099.token").mkdir()
    run.evaluations.write_text("".join(line_of(Evaluation(step, loss, labels, 1.0)) + "\n" for step, loss, labels in evaluations))
    return run


def left(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def names(*steps: int) -> list[str]:
    return [checkpoint_name(step) for step in steps]


@pytest.mark.parametrize(("evaluations", "best", "kept"), [
    ([], None, [4, 5]),
    ([(1, 3.0, 9), (2, 2.0, 9), (3, 2.5, 9), (5, 2.2, 9)], 2, [2, 4, 5]),
    ([(1, 3.0, 9), (5, 2.0, 9)], 5, [4, 5]),
    ([(2, 2.0, 9), (3, 2.0, 9), (5, 4.0, 9)], 2, [2, 4, 5]),  # of equals the first
    ([(2, math.nan, 9), (3, 3.0, 9), (5, math.nan, 9)], 3, [3, 4, 5]),
    ([(2, 1.0, 7), (3, 3.0, 9), (5, 4.0, 9)], 3, [3, 4, 5]),  # that of step 2 was on another text
])
def test_the_newest_and_the_best_stay(
    tmp_path: Path, evaluations: list[tuple[int, float, int]], best: int | None, kept: list[int],
) -> None:
    run = saved(tmp_path, range(1, 6), *evaluations)
    prune(run, keep=2)
    assert left(run) == names(*kept)
    found = best_checkpoint(run)
    assert (found.step if found else None) == best
    assert figures(run, 1)["best_checkpoint"] == (run.checkpoint(best) if best else None)


def test_the_best_evaluation_may_have_no_checkpoint(tmp_path: Path) -> None:
    run = saved(tmp_path, range(2, 4), (1, 1.0, 9), (2, 3.0, 9), (3, 2.0, 9))
    assert (found := best_checkpoint(run)) is not None and found.step == 3
    numbers = figures(run, 1)
    assert (numbers["best_evaluation_loss"], numbers["evaluation_loss"]) == (1.0, 2.0)
    assert best_evaluation([]) is None


def test_nothing_is_deleted_while_nobody_knows_the_best(tmp_path: Path) -> None:
    run = saved(tmp_path, range(1, 4))
    run.evaluations.unlink()
    run.evaluations.mkdir()  # reading it fails, for root too
    before = left(run)
    prune(run, keep=1)
    assert left(run) == before
