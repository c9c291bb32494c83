"""T5 equals one process of plain transformers on every axis that it has, in fp64 to 1e-12: loss, norm, and every parameter."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from sys import _getframe
from typing import Any

import pytest
from exact import EXACT, WRONG, cases
from lists import lay
from planting import planted, wrapped
from stacks import Training, distance
from torch import Tensor

from hpc_mp.layout.layout import Layout
from hpc_mp.train.model import encoder_decoder
from hpc_mp.train.model.encoder_decoder import DECODER, ENCODER, POSITIONS, EncoderDecoderStage
from hpc_mp.train.model.transformers_model import TransformersModel
from hpc_mp.train.parallel.projection import TensorAxis

ONE = {"layers": (5,)}  # two of the encoder, three of the decoder
LAYOUTS: Mapping[str, Layout] = {
    "one": lay(**ONE),
    "tp2": lay(2, **ONE),
    "tp4": lay(4, **ONE),  # five heads
    "pp2 in the encoder": lay(pipeline=2, layers=(1, 4), microbatches=4),
    "pp2 between": lay(pipeline=2, layers=(2, 3)),
    "pp2 in the decoder": lay(pipeline=2, layers=(4, 1)),
    "pp3 layers 0+5+0": lay(pipeline=3, layers=(0, 5, 0), microbatches=4),
    "pp4": lay(pipeline=4, layers=(1, 1, 2, 1), microbatches=4),
    "pp2 zero_bubble_v": lay(pipeline=2, layers=(1, 2, 1, 1), schedule="zero_bubble_v", microbatches=4),
    "zero1": lay(data=2, zero=1, **ONE),
    "zero3": lay(data=2, zero=3, **ONE),
    "zero3 pp2": lay(pipeline=2, data=2, zero=3, layers=(1, 4)),
    "tp2 pp2 dp2": lay(2, 2, 2, layers=(3, 2), zero=2, reduce="microbatch"),
    "recompute full": lay(2, 2, layers=(1, 4), recompute="full"),
    "recompute every-3": lay(data=2, zero=3, recompute="every-3", **ONE),
}
TRAININGS = {
    "t5": Training(),
    "t5 1.1": Training("t5 1.1"),
    "whole samples": Training(padded=False),
    "dropout": Training("t5 1.1", {"dropout_rate": 0.2}),
}
QUICK = {("t5 1.1", "zero3 pp2")}


@pytest.mark.parametrize(("training", "name"), cases([(training, name) for training in TRAININGS for name in LAYOUTS], QUICK))
def test_t5_equals_one_process(training: str, name: str) -> None:
    assert distance(LAYOUTS[name], TRAININGS[training]) < EXACT


def stays(*names: str) -> Callable[[], None]:
    """The gradient of some tensors stays on the stage that has used them."""
    return wrapped(TransformersModel, "received", lambda received: lambda *given: {
        name: replace(tensor, differentiable=name not in names) for name, tensor in received(*given).items()})


@planted(EncoderDecoderStage, "_score_biases")
def later_tokens_are_seen(biases: Callable[..., Any], stage: EncoderDecoderStage, tensors: Any, documents: Tensor | None) -> Any:
    added = biases(stage, tensors, documents)
    return {name: bias.clamp(min=-1.0) if name == encoder_decoder.BIAS[DECODER] else bias for name, bias in added.items()}


def buckets_of_one_direction() -> None:
    build = TransformersModel.build

    def built(self: TransformersModel, *given: Any) -> Any:
        stage: Any = build(self, *given)
        stage.buckets[ENCODER] = stage.buckets[ENCODER].tril()
        return stage

    setattr(TransformersModel, "build", built)  # noqa: B010


def unscaled() -> None:
    model = Training.model
    setattr(Training, "model", lambda *given: _unscaled(model(*given)))  # noqa: B010


def _unscaled(model: TransformersModel) -> TransformersModel:
    return replace(model, family=replace(model.family, head_scale=1.0), shape=replace(
        model.shape, family=replace(model.family, head_scale=1.0)))


CONTROLS: Mapping[str, tuple[str, Callable[[], None]]] = {
    "the encoder's table learns on one stage only": ("pp2 in the encoder", stays(POSITIONS[ENCODER])),
    "the decoder's table learns on one stage only": ("pp2 in the decoder", stays(POSITIONS[DECODER])),
    "the norm between the stacks does not learn": ("pp2 in the encoder", stays("norm")),
    "the encoder learns of no stage behind": ("pp2 in the decoder", stays(ENCODER)),
    "the gradient of the encoder's output is not summed": ("tp2", wrapped(
        TensorAxis, "enter", lambda enter: lambda axis, x: x if _getframe(1).f_code.co_name == "_layers" else enter(axis, x))),
    "later tokens are seen": ("one", later_tokens_are_seen),
    "the encoder has buckets of one direction": ("one", buckets_of_one_direction),
    "the head is not scaled": ("one", unscaled),
}
QUICK_CONTROLS = {"the gradient of the encoder's output is not summed"}


@pytest.mark.parametrize("control", cases(CONTROLS, QUICK_CONTROLS))
def test_what_t5_needs_is_missed(control: str) -> None:
    name, sabotage = CONTROLS[control]
    assert distance(LAYOUTS[name], Training(), before=sabotage) > WRONG


@pytest.mark.prove
def test_padding_that_is_seen_is_another_training() -> None:
    assert distance(LAYOUTS["one"], Training(), Training(padded=False)) > WRONG
