"""A module written in one forward with places to cut, and an nn.Sequential, equal themselves as plain torch runs them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from beside import SAMPLES
from exact import EXACT, WRONG, cases
from lists import LENGTH, WIDTH, WORDS, lay, listed, no_gradient_of_the_skip, no_sum_over_ties, scheduled
from modules import off, parts, row, written
from torch import Tensor, nn

from hpc_mp.base.errors import HpcMpError
from hpc_mp.train.model.cut_points import CutPoint, layers_of
from hpc_mp.train.model.layer_list import LayerSpec
from hpc_mp.train.model.listed_stage import ListedModel

LAYOUTS = {
    "one": (written, lay(layers=(6,))),
    "pp2": (written, lay(pipeline=2, layers=(2, 4))),
    "pp2 dp2 zero_bubble_v": (written, lay(pipeline=2, data=2, layers=(1, 2, 2, 1), schedule="zero_bubble_v", zero=1)),
    "zero3": (written, lay(data=2, layers=(6,), zero=3)),
    "row, one": (row, lay(layers=(7,))),
    "row, pp2 dp2 zero3": (row, lay(pipeline=2, data=2, layers=(3, 4), zero=3, recompute="full")),
    "tp2 pp2": (written, lay(2, 2, layers=(3, 3))),
    "row, tp2": (row, lay(2, layers=(7,))),
    **{name: (written, layout) for name, layout in scheduled((2, 2, 2), (1, 2, 1, 2)).items()},
    **{f"row, {name}": (row, layout) for name, layout in scheduled((2, 3, 2), (2, 2, 1, 2)).items()},
}
QUICK = ("pp2 dp2 zero_bubble_v", "row, pp2 dp2 zero3")


@pytest.mark.parametrize("name", cases(LAYOUTS, QUICK))
def test_a_module_equals_itself(name: str) -> None:
    assert off(*LAYOUTS[name]) < EXACT


def other_buffers() -> None:
    made = ListedModel.made

    def spoilt(self: ListedModel, spec: LayerSpec) -> nn.Module:
        module = made(self, spec)
        for buffer in module.buffers():
            buffer.mul_(1.001)
        return module

    setattr(ListedModel, "made", spoilt)  # noqa: B010


def dropout_by_part() -> None:
    setattr(LayerSpec, "own", lambda spec, path, own=LayerSpec.own: own(spec, path).replace(".drop", f".{spec.name}.drop"))  # noqa: B010


BROKEN = (no_sum_over_ties, no_gradient_of_the_skip, other_buffers, dropout_by_part)


@pytest.mark.parametrize("broken", cases(BROKEN, BROKEN[:1]))
def test_a_broken_module_is_off(broken: Callable[[], None]) -> None:
    assert off(*LAYOUTS["pp2"], broken) > WRONG


def test_names_and_values_are_those_of_the_module() -> None:
    module, listed_model = written(), parts(written, SAMPLES)
    named, source = dict(module.named_parameters()), listed_model.first_values()
    assert listed_model.weights.keys() == named.keys() and {"head.weight", "heat", "trunk.blocks.1.up.weight"} <= named.keys()
    for name, weight in listed_model.weights.items():
        assert torch.equal(source(weight, tuple(slice(None) for _ in weight.shape)), named[name])
    buffers = {path: buffer for spec in listed_model.layers for path, buffer in listed_model.made(spec).named_buffers()}
    assert all(torch.equal(buffers[path], buffer) for path, buffer in module.named_buffers())


def test_a_module_is_left_as_it_was() -> None:
    module, other = written().train(), written().train()
    layers_of(module)
    assert module.state_dict().keys() == other.state_dict().keys() and vars(module).keys() == vars(other).keys()
    assert all(inner.training for inner in module.modules())




class Cut(nn.Module):
    """A marker before and behind a computation, as a base of what cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.cut = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), CutPoint()
        self.norm = nn.BatchNorm1d(LENGTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        return self.between(self.cut(self.words(ids)))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden


class Branching(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden if hidden.sum() > 0 else -hidden  # here


class Counting(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        self.count = self.count + 1
        return hidden * self.count


class CountingInPlace(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.count.add_(1)


class Averaging(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden + self.count.copy_(hidden.mean())


class Normed(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        return self.mix(self.norm(hidden))


class Drawing(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden + torch.randn(WIDTH)


class DrawingAnew(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden + torch.randn_like(hidden)


class OtherwiseInTraining(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        return self.mix(hidden) if self.training else hidden


class Selecting(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        return self.cut(hidden[hidden.sum((1, 2)).nonzero().squeeze(-1)])


class InPlace(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden.mul_(2) + 1


class Unlearning(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return hidden * 2


class NoTensor(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        self.cut(hidden)
        return None


class Frozen(Cut):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.mix.requires_grad_(False).bias


REFUSED = {
    Branching: r"Branching\.forward \(.*test_cut_points\.py:{line}\): cannot be cut here",
    Counting: "Counting.forward: it changes the buffers count",
    CountingInPlace: "CountingInPlace.forward: it changes the buffers count",
    Averaging: "its forward changes the buffers count",
    Normed: "its forward changes the buffers norm.num_batches_tracked: which every replica",
    Drawing: "draws random numbers between its cut points",
    DrawingAnew: "its forward draws random numbers",
    OtherwiseInTraining: "it computes something else in training than in an evaluation",
    Selecting: "hapes must not depend on values",
    InPlace: "changes in place part0.words: which is another layer's",
    Unlearning: "cannot be cut here: torch.no_grad and torch.autocast are not recorded",
    NoTensor: "returns None",
    Frozen: "mix.bias: requires no gradient",
    lambda: nn.Linear(WIDTH, WIDTH): "has no place at which it can be cut.*self.cut = CutPoint",
    nn.Sequential: "has no place at which it can be cut",
}


@pytest.mark.parametrize("make", REFUSED)
def test_what_cannot_work_is_refused(make: Callable[[], nn.Module]) -> None:
    here = next(number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# here"))
    with pytest.raises(HpcMpError, match=REFUSED[make].replace("{line}", str(here))) as caught:
        parts(make, SAMPLES).traced  # noqa: B018
    assert caught.value.remedy


def test_arguments_with_defaults_come_from_the_batch_if_it_has_them() -> None:
    kept, taken = layers_of(written()), layers_of(written(), ("mask", "labels"))
    assert kept.defaults == ("scale", "mask") and taken.defaults == ("scale",)
    assert [any("mask" in spec.uses for spec in made.layers) for made in (kept, taken)] == [False, True]


def test_a_batch_with_a_tensor_that_the_forward_leaves_at_its_default_is_refused() -> None:
    made, plain = layers_of(written()), listed(SAMPLES)
    batch = {**plain.batch, "mask": plain.batch["weight"]}
    with pytest.raises(HpcMpError, match="the batch's mask: is an argument of the forward that keeps its default"):
        ListedModel(made.layers, plain.objective, 0, made.outputs, batch, made.defaults).traced  # noqa: B018


def test_a_cut_of_no_module_is_refused() -> None:
    with pytest.raises(HpcMpError, match=r"cut = \*.side: matches no module of it"):
        layers_of(row(), cut={"*.up": "column", "*.side": "row"})


def test_what_a_forward_returns_is_made_again() -> None:
    made, (scores, extra) = layers_of(written()), torch.ones(2, 3)
    assert made.returned(dict(zip(made.outputs, (scores, extra), strict=True))) == (scores, extra)
