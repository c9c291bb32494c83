"""A step whose gradients are not finite changes nothing, on all ranks alike; a run may have so many of them. fp16's loss scale
moves as DeepSpeed's does, and no other step is skipped."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import run_engine
from exact import EXACT, GPT2, LAYOUTS, LLAMA, TIED, Engine, Plain, cases
from layouts import job, layout, parameters, relaunch, run_whole, start, trained_run
from planting import plant, planted, wrapped
from ranks import exit_codes
from safetensors import safe_open

from hpc_mp.job import JobSpec, dump_job
from hpc_mp.job.spec import LossScale
from hpc_mp.rundir import RunDirectory, read_json, read_lines
from hpc_mp.train.data import IGNORE, Samples
from hpc_mp.train.optimizer.optimizer import Optimizer
from hpc_mp.train.step.loss_scale import ScaleRule, ScaleState, advanced, first, on_device


@pytest.mark.parametrize(("name", "model", "rank", "value"), [
    ("one", "gpt2", 0, math.nan), ("tp2 pp2 dp2 zero1", "llama-tied", 1, math.inf), ("dp4 zero3", "llama", 3, math.inf),
    ("dp2 zero0", "gpt2", 1, math.nan)])
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
    run = trained_run(job(place, "gpt2", ["train.steps=2"]), plant(math.inf, 0, 1))
    resumed = relaunch(run, place, "gpt2", ["train.steps=4"])
    right = plain(job(place, "gpt2", ["train.steps=4"]), skipped=(1,))
    assert replace(resumed, norms=right.norms).distance(right) < EXACT


def test_one_too_many_ends_the_run(place: Path) -> None:
    run = start(job(place, "gpt2", ["train.skip_steps=0"]))
    assert exit_codes(1, run.job, plant(math.nan, 0, 1)) == [1]
    message = read_json(run.failure(1, 0))["message"]
    assert "step 2, on the samples 24 to 47: the gradient norm is nan" in message and "0 steps may be skipped" in message
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2, 3]


@pytest.mark.parametrize(("overrides", "ranks"), [
    ((), 1), (layout(data=2, zero=3), 2), (('train.precision="fp16"', "train.loss_scale={ initial = 1.0, minimum = 1.0 }"), 1)])
def test_a_run_without_any_other_step_fails(place: Path, overrides: Sequence[str], ranks: int) -> None:
    run = start(job(place, "gpt2", ["train.steps=2", *overrides]))
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


CPU = torch.device("cpu")

# The rule, the steps (x: one that overflows) and the scale behind each of them: what DeepSpeed 0.19.8's DynamicLossScaler does.
SEQUENCES: dict[str, tuple[LossScale, str, list[float]]] = {
    "the defaults: the first overflow passes": (LossScale(), ".x.x.x", [65536, 65536, 65536, 32768, 32768, 16384]),
    "no patience": (LossScale(hysteresis=1), ".xx.x", [65536, 32768, 16384, 16384, 8192]),
    "patience of three is used up once": (LossScale(initial=64, hysteresis=3), "xx.xx", [64, 64, 64, 32, 16]),
    "patience comes back at once": (LossScale(initial=64, consecutive_hysteresis=True), "x.x.xx", [64, 64, 64, 64, 64, 32]),
    "growth after the window and one, then after each window": (
        LossScale(initial=8, window=2), ".......", [8, 8, 16, 16, 32, 32, 64]),
    "an overflow begins the window anew": (LossScale(initial=8, window=2, hysteresis=1), "..x...", [8, 8, 4, 4, 4, 8]),
    "growth brings patience back": (LossScale(initial=8, window=1), "x..xx", [8, 8, 16, 16, 8]),
    "no lower than the minimum": (LossScale(initial=4, hysteresis=1, minimum=1.5), "xxx", [2, 1.5, 1.5]),
    "one that stays": (LossScale(initial=128, window=0), "x..x", [128, 128, 128, 128]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_scale_moves_as_deepspeeds(name: str) -> None:
    rule, steps, scales = SEQUENCES[name]
    state, found = on_device(first(rule), CPU), []
    for step in steps:
        state, _ = advanced(state, torch.tensor(step == "."), rule)
        found.append(float(state[0]))
    assert found == scales


@pytest.mark.parametrize(("state", "rule", "absorbed"), [
    (ScaleState(4, 0, 2), LossScale(), True), (ScaleState(4, 0, 1), LossScale(), True), (ScaleState(1, 7, 2), LossScale(), True),
    (ScaleState(1, 0, 1), LossScale(), False), (ScaleState(4, 0, 2), LossScale(window=0), False),
    (first(None), None, False)])
def test_a_step_is_absorbed_while_the_scale_can_give_way(state: ScaleState, rule: ScaleRule | None, absorbed: bool) -> None:
    assert bool(advanced(on_device(state, CPU), torch.tensor(False), rule)[1]) == absorbed
    assert not advanced(on_device(state, CPU), torch.tensor(True), rule)[1]


FP16 = ('train.precision="fp16"', "train.loss_scale.hysteresis=1", "train.skip_steps=0", "checkpoint.every=1",
        "checkpoint.keep=3")
CASES = [("tp2 pp2 dp2 zero1", TIED, rank) for rank in range(8)] + [
    *(("tp2 pp2 dp2 zero3", LLAMA, rank) for rank in (0, 3, 7)), *(("dp4 zero0", GPT2, rank) for rank in range(4))]
QUICK = (("tp2 pp2 dp2 zero1", TIED, 5), ("dp4 zero0", GPT2, 3))


@pytest.mark.parametrize(("name", "model", "rank"), cases(CASES, QUICK))
def test_an_overflow_on_one_rank_skips_that_step_on_all(place: Path, name: str, model: str, rank: int) -> None:
    """What ranks hold behind the step is what they held before it, to the last bit; training goes on."""
    spec = job(place, model, [*FP16, *LAYOUTS[name]])
    run = start(spec)
    assert [norm is None for norm in run_whole(spec, before=plant(math.inf, rank, 1), run=run).norms] == [False, True, False]
    one, two, three = (run.checkpoints / f"step-0000000{step}" for step in (1, 2, 3))
    assert content(one) == content(two), "parameters and optimizer state"
    assert content(two).keys() == content(three).keys() and content(two) != content(three)
    assert [line["loss_scale"] for line in read_lines(run.metrics)] == [65536, 32768, 32768]
    assert "step 2, on the samples 24 to 47: the gradient norm is" in run.main_log.read_text()
    assert "it is skipped, and the loss scale is 32768 now" in run.main_log.read_text()


def content(checkpoint: Path) -> dict[str, bytes]:
    """All tensors of a checkpoint, to the last bit."""
    found = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {f"{path.name} {key}": file.get_tensor(key).numpy().tobytes() for key in file.keys()}  # noqa: SIM118
    return found


def test_without_agreement_a_rank_would_train_on(place: Path) -> None:
    """The negative control: what another rank counts is not looked at, and an overflow in a copy is not seen."""
    spec = job(place, GPT2, [*FP16, *LAYOUTS["dp4 zero0"]])

    alone = wrapped(Optimizer, "squared_norm", lambda squared: lambda self: torch.where(self.weights.any(), squared(self), 0.0))
    assert run_engine(spec, before=lambda: (plant(math.inf, 3, 1)(), alone())).norms[1] is not None


def test_gradients_that_16_bits_lose_survive_with_a_scale(engine: Engine) -> None:
    """Without one a part of the small gradients is zero: the norm is further from that of fp32."""
    whole = engine(GPT2, 'train.precision="fp32"')

    def off(scale: str) -> float:
        found = engine(GPT2, 'train.precision="fp16"', f"train.loss_scale.initial={scale}", "train.loss_scale.window=0")
        return max(abs(a - b) for a, b in zip(found.norms, whole.norms, strict=True))

    assert off("1024.0") < 1e-3 < 5e-3 < off("0.0001")


@pytest.mark.parametrize("name", cases(("tp2", "dp2 zero3", "pp2 1f1b M3", "tp2 pp2 dp2 zero2"), ("tp2 pp2 dp2 zero2",)))
def test_fp16_is_near_fp32_on_every_layout(engine: Engine, name: str) -> None:
    whole = engine(LLAMA, 'train.precision="fp32"')
    assert 1e-6 < engine(LLAMA, 'train.precision="fp16"', *LAYOUTS[name]).distance(whole) < 1e-3, "fp16 keeps 11 bits"


def resumed(spec: JobSpec, run: RunDirectory, before: Callable[[], None] = lambda: None) -> tuple[float, ...]:
    run.job.write_text(dump_job(spec))
    return run_whole(spec, before=before, run=run).losses


def test_a_resume_goes_on_with_the_scale(place: Path) -> None:
    """Three steps and three more are six, to the last bit: with the scale, its window and its patience where they were."""
    more = ['train.precision="fp16"', "train.loss_scale.initial=512", "train.loss_scale.window=2", "train.clip=0.0"]
    spec = job(place, GPT2, [*more, "train.steps=6"])
    whole, halves = start(spec), start(spec)
    one = run_whole(spec, before=plant(math.inf, 0, 1), run=whole)
    resumed(job(place, GPT2, [*more, "train.steps=3"]), halves, plant(math.inf, 0, 1))
    assert read_json(halves.checkpoints / "step-00000003" / "state.json")["loss_scale"] == [512, 1, 1]
    resumed(spec, halves)
    scales = [[line["loss_scale"] for line in read_lines(run.metrics)] for run in (whole, halves)]
    assert scales == [[512, 512, 512, 512, 1024, 1024]] * 2
    assert replace(one, norms=()).distance(replace(one, norms=(), parameters=parameters(
        spec, halves.checkpoints / "step-00000006"))) == 0
    assert read_json(halves.checkpoints / "step-00000006" / "state.json")["absorbed"] == 1


def test_skipped_steps_count_when_the_scale_cannot_give_way(place: Path) -> None:
    spec = job(place, GPT2, ['train.precision="fp16"', "train.loss_scale.window=0", "train.skip_steps=1"])
    assert "it is skipped, 1 of 1" in trained_run(spec, plant(math.inf, 0, 1)).main_log.read_text()
