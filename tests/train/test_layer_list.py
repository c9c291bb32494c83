"""A model written as a list of layers equals plain torch on every axis, in fp64 to 1e-12."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from beside import SAMPLES
from exact import EXACT, WRONG, cases
from lists import (
    CUT,
    LAYERS,
    LAYOUTS,
    LENGTH,
    QUICK,
    WIDTH,
    Block,
    Join,
    distance,
    lay,
    listed,
    no_gradient_of_the_skip,
    no_sum_over_ties,
    plain,
)
from torch import Tensor, nn

from hpc_mp.base.errors import HpcMpError
from hpc_mp.train.model.layer_list import LayerSpec
from hpc_mp.train.model.listed_stage import ListedModel
from hpc_mp.train.parallel import dropout


@pytest.mark.parametrize("name", cases(LAYOUTS, QUICK))
def test_a_list_of_layers_equals_plain_torch(name: str) -> None:
    assert distance(LAYOUTS[name]) < EXACT


def dropout_as_if_whole() -> None:
    made = dropout.WideDropout.__init__

    def alone(self: dropout.WideDropout, *given: Any) -> None:
        made(self, *given)
        self.tensor = self.tensor.alone

    setattr(dropout.WideDropout, "__init__", alone)  # noqa: B010


@pytest.mark.parametrize(("broken", "name"), [
    (no_sum_over_ties, "pp2"), (no_gradient_of_the_skip, "pp2"), (dropout_as_if_whole, "tp2")])
def test_a_broken_list_is_off(broken: Callable[[], None], name: str) -> None:
    assert distance(LAYOUTS[name], broken) > WRONG


def joined(make: type[Join], samples: int) -> ListedModel:
    """The list with another join."""
    return listed(samples, [replace(spec, make=make) if spec.name == "join" else spec for spec in LAYERS])


class Looking(Join):
    """The skip gets no gradient."""

    def forward(self, hidden: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(hidden, skip.detach())


def test_what_crosses_may_get_no_gradient() -> None:
    looking = partial(joined, Looking)
    assert distance(LAYOUTS["pp4 1f1b"], make=looking, reference=partial(plain, make=looking)) < EXACT


class Wide(Join):
    """Gives fp32, whatever computes."""

    def forward(self, hidden: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        mixed, extra = super().forward(hidden, skip)
        return mixed.float(), extra.float()


@pytest.mark.parametrize(("precision", "rounding"), cases(
    [("fp32", 1e-5), ("bf16", 0.1), ("fp16", 0.02)], [("bf16", 0.1)]))
def test_what_crosses_has_the_format_that_computes(precision: str, rounding: float) -> None:
    layout = lay(pipeline=3, layers=(2, 4, 1), microbatches=4, precision=precision)
    assert 0.0 < distance(layout, make=partial(joined, Wide)) < rounding


class Chosen(nn.Module):
    """The number of its rows depends on values."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[hidden.sum((1, 2)) > 0]


class Twice(Block):
    """Calls a linear module two times."""

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return super().forward(super().forward(hidden, weight), weight)


HEAD = LAYERS[-1]
REFUSED = {
    "its forward changes the buffers": LayerSpec("norm", lambda: nn.BatchNorm1d(LENGTH)),
    "hapes must not depend on values": LayerSpec("chosen", Chosen),
    "neither in the batch nor given by an earlier layer": LayerSpec("late", nn.Identity, ("later",)),
    "but it returns Tensor": LayerSpec("two", nn.Identity, gives=("hidden", "more")),
    "is the name of a tensor of the batch": LayerSpec("over", nn.Identity, gives=("labels",)),
    "must be a word without a full stop": LayerSpec("a.b", nn.Identity),
    "are several of one name": LayerSpec("split", nn.Identity),
    "is no nn.Linear": LayerSpec("cut", nn.Identity, cut={"": "row"}),
    "cut = side: is no nn.Linear": LayerSpec("cut", Block, ("hidden", "weight"), cut={"side": "row"}),
    "cut = up, down: is called several times": LayerSpec("twice", Twice, ("hidden", "weight"), cut=CUT),
    "is no parameter of it": LayerSpec("other", nn.Identity, tied={"weight": "words.weight"}),
    "is no parameter of a layer": replace(HEAD, tied={"weight": "wrong.weight"}),
    "a tied parameter is whole on every rank": LayerSpec("tie", lambda: nn.Linear(WIDTH, WIDTH, bias=False), cut={"": "column"},
                                                         tied={"weight": "words.weight"}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused(words: str) -> None:
    model = listed(SAMPLES, (*LAYERS[:2], REFUSED[words]))
    with pytest.raises(HpcMpError, match=words):
        assert model.ties(lay(layers=(len(model.layers),))) or model.traced
