"""``evaluate.patience``: a run ends, completed, when its loss on held-out text has not become less for so many evaluations."""

import math
from pathlib import Path

import pytest
from exact import GPT2, HELD_OUT
from layouts import job, relaunch, trained_run

from hpc_mp.rundir import read_lines
from hpc_mp.rundir.checkpoints import complete_steps, step_of
from hpc_mp.rundir.history import complete
from hpc_mp.rundir.records import Evaluation
from hpc_mp.rundir.retention import exhausted

RISING = (*HELD_OUT, "evaluate.every=1", "train.learning_rate=3.0", "checkpoint.every=2", "checkpoint.keep=1")


@pytest.mark.parametrize(("losses", "patience", "gain", "ends"), [
    ([3, 2, 1], 1, 0.0, False), ([1, 2], 1, 0.0, True), ([1, 2], 2, 0.0, False), ([1, 2, 1], 2, 0.0, True),
    ([3, 2.95, 2.9], 2, 0.2, True), ([3, 2.95, 2.7], 2, 0.2, False), ([2, math.nan, math.inf], 2, 0.0, True),
    ([math.nan, 1.0], 1, 0.0, False), ([1, 2, 3, 4], 0, 0.0, False), ([2, 1, 2, 0.5], 2, 0.0, False)])
def test_the_rule(losses: list[float], patience: int, gain: float, ends: bool) -> None:
    made = [Evaluation(step, loss, 90, 1.0) for step, loss in enumerate(losses, 1)]
    assert exhausted(made, patience, gain, "loss") is ends
    another_text = [Evaluation(1, 0.0, 7, 1.0), *made]
    assert exhausted(another_text, patience, gain, "loss") is ends, "losses on another text do not count"
    of_rows = [Evaluation(step, -loss, 90, 1.0, accuracy=1 - loss / 8) for step, loss in enumerate(losses, 1)]
    assert exhausted(of_rows, patience, gain / 8, "accuracy") is ends, "a higher accuracy is better, whatever the loss"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.prove)])
def test_a_run_ends_when_its_patience_does(place: Path, ranks: int) -> None:
    keys = (*RISING, "train.steps=9", f"job.ranks_per_node={ranks}")
    spec = job(place, GPT2, [*keys, "evaluate.patience=2"])
    run = trained_run(spec)
    losses = [line["loss"] for line in read_lines(run.evaluations)]
    last = len(losses)
    least = min(range(last), key=losses.__getitem__)
    assert last < 9 and last - 1 - least == 2, "no loss is less than one of two evaluations before the end"
    assert [line["step"] for line in read_lines(run.metrics)][-1] == last == step_of(complete_steps(run.checkpoints)[-1])
    assert "no lower loss on the held-out text for 2 evaluations: the run ends" in run.main_log.read_text()
    assert complete(run, spec) and not complete(run, job(place, GPT2, [*keys, "evaluate.patience=3"]))

    before = run.metrics.read_text()
    relaunch(run, place, GPT2, [*keys, "evaluate.patience=2"])
    assert run.metrics.read_text() == before, "a run that has ended does not go on by itself"
    relaunch(run, place, GPT2, [*keys, "evaluate.patience=0"])
    assert [line["step"] for line in read_lines(run.metrics)] == list(range(1, 10)), "it goes on if it is asked to"
