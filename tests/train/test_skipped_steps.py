"""A step whose gradients are not finite changes nothing, on all ranks alike; a run may have so many of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact import EXACT, LAYOUTS, Plain
from layouts import job, layout, relaunch, run_whole, start
from planting import plant, planted, wrapped
from ranks import exit_codes

from hpc_mp.rundir import read_json, read_lines
from hpc_mp.train.data import IGNORE, Samples


@pytest.mark.parametrize(("name", "model", "rank", "value"), [
    ("one", "gpt2", 0, math.nan), ("tp2 pp2 dp2 zero1", "llama-tied", 1, math.inf), ("dp4 zero3", "llama", 3, math.inf),
    ("dp2 zero0", "gpt2", 1, math.nan),
])
def test_a_skipped_step_changes_nothing(place: Path, plain: Plain, name: str, model: str, rank: int, value: float) -> None:
    spec = job(place, model, LAYOUTS.get(name, ()))
    run = start(spec)
    found = run_whole(spec, before=plant(value, rank, 1), run=run)
    right = plain(job(place, model), skipped=(1,))
    assert replace(found, norms=right.norms).distance(right) < EXACT
    assert found.norms[1] is None
    assert found.norms[::2] == pytest.approx(right.norms[::2], abs=EXACT)
    assert "step 2, on the samples 24 to 47: the gradient norm is" in run.main_log.read_text()
    assert right.distance(plain(job(place, model))) > 1e-6, "a step that is not skipped would be seen"


def test_a_resume_after_a_skipped_step_is_exact(place: Path, plain: Plain) -> None:
    """AdamW corrects its bias by the number of updates, not of steps."""
    spec = job(place, "gpt2", ["train.steps=2"])
    run = start(spec)
    run_whole(spec, before=plant(math.inf, 0, 1), run=run)
    resumed = relaunch(run, place, "gpt2", ["train.steps=4"])
    right = plain(job(place, "gpt2", ["train.steps=4"]), skipped=(1,))
    assert replace(resumed, norms=right.norms).distance(right) < EXACT


def test_one_too_many_ends_the_run(place: Path) -> None:
    spec = job(place, "gpt2", ["train.skip_steps=0"])
    run = start(spec)
    assert exit_codes(1, run.job, plant(math.nan, 0, 1)) == [1]
    message = read_json(run.failure(1, 0))["message"]
    assert "step 2, on the samples 24 to 47: the gradient norm is nan" in message and "0 steps may be skipped" in message
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2, 3]


@pytest.mark.parametrize(("overrides", "ranks"), [
    ((), 1), (layout(data=2, zero=3), 2), (('train.precision="fp16"', "train.loss_scale={ initial = 1.0, minimum = 1.0 }"), 1)])
def test_a_run_without_any_other_step_fails(place: Path, overrides: Sequence[str], ranks: int) -> None:
    spec = job(place, "gpt2", ["train.steps=2", *overrides])
    run = start(spec)
    assert 1 in exit_codes(ranks, run.job, lambda: [plant(math.nan, 0, step)() for step in (0, 1)])
    assert "all 2 steps of the run were skipped, and its model is as it began" in run.main_log.read_text()
    assert not list(run.checkpoints.glob("step-*"))


def without_labels(step: int) -> Callable[[], None]:
    """None of the tokens of a step (from 0) counts."""

    theirs = range(step * 24, (step + 1) * 24)

    @planted(Samples, "batch")
    def ignored(batch: Any, samples: Samples, positions: range) -> Any:
        ids, labels = batch(samples, positions)
        return ids, np.full_like(labels, IGNORE) if positions[0] in theirs else labels

    uncounted = wrapped(Samples, "label_count", lambda count: lambda samples, positions: (
        0 if positions[0] in theirs else count(samples, positions)))
    return lambda: (ignored(), uncounted())


@pytest.mark.parametrize(("name", "model"), [("one", "gpt2"), ("tp2 pp2 dp2 zero1", "llama")])
def test_a_step_without_labels_changes_nothing(place: Path, plain: Plain, name: str, model: str) -> None:
    spec = job(place, model, [*LAYOUTS.get(name, ()), "train.skip_steps=0"])
    run = start(spec)
    found = run_whole(spec, before=without_labels(1), run=run)
    right = plain(job(place, model), skipped=(1,))
    assert found.losses[1] is None
    assert replace(found, norms=right.norms, losses=right.losses).distance(right) < EXACT
    assert "none of their tokens counts in the loss; it is skipped" in run.main_log.read_text()
