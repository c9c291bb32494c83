"""A module written in one forward with places to cut, and an nn.Sequential, equal themselves as plain torch runs them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from exact import EXACT, WRONG, cases
from lists import (
    LENGTH,
    SAMPLES,
    SEED,
    WIDTH,
    WORDS,
    Block,
    Flat,
    Join,
    Reference,
    Split,
    Words,
    distance,
    lay,
    listed,
    no_gradient_of_the_skip,
    no_sum_over_ties,
    scheduled,
    steps,
)
from torch import Tensor, nn

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.layout import Layout
from hpc_mp.train.engine.cut_points import CutPoint, layers_of
from hpc_mp.train.engine.dropout import DropoutClock
from hpc_mp.train.engine.layer_list import LayerSpec
from hpc_mp.train.engine.listed_stage import ListedModel


class Trunk(nn.Module):
    """Has a marker inside, in a loop, and a parameter of its own between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.cut = nn.ModuleList([Block(), Block()]), CutPoint()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, hidden: Tensor, *, weight: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(self.cut(hidden), weight) * self.gain
        return hidden


class Written(nn.Module):
    """The same kind of model in one forward. Besides modules, it has parameters, buffers, a constant and sizes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.words, self.split, self.trunk, self.join = Words(), nn.Embedding(WORDS, WIDTH), Split(), Trunk(), Join()
        self.words.weight = self.head.weight
        self.heat = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.linspace(-0.1, 0.3, WIDTH))
        self.register_buffer("slope", torch.linspace(0.8, 1.2, WIDTH), persistent=False)
        self.cut = CutPoint()

    def forward(self, ids: Tensor, weight: Tensor, scale: float = 1.5, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        samples, length = ids.shape
        hidden, skip = self.split(self.cut(self.words(ids)))
        if mask is not None:
            hidden = hidden * mask
        hidden = self.trunk(hidden + self.shift, weight=weight) * self.slope
        hidden, extra = self.join(self.cut(hidden.view(samples * length, -1)).view(samples, length, -1), skip)
        peek = hidden @ self.head.weight.t() * self.heat
        hidden = self.cut(hidden + scale * peek.softmax(-1) @ self.words.weight)
        return self.head(hidden * torch.linspace(0.9, 1.1, hidden.shape[-1])) * self.heat, extra


def written() -> Written:
    torch.manual_seed(5)
    module = Written()
    nn.init.normal_(module.head.weight)
    return module


class First(nn.Module):
    """The first of two results."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        first: Tensor = self.inner(hidden)[0]
        return first


def row() -> nn.Sequential:
    """A module that occurs twice, dropout by itself, and a tie between the ends."""
    torch.manual_seed(5)
    mix, words, head = nn.Linear(WIDTH, WIDTH), nn.Embedding(WORDS, WIDTH), Words()
    head.weight = words.weight
    return nn.Sequential(words, First(Split()), mix, nn.Dropout(0.2), nn.Tanh(), mix, head)


def parts(make: Callable[[], nn.Module], samples: int) -> ListedModel:
    made, plain = layers_of(make(), cut={"*up": "column", "*down": "row"} if make in (written, row) else {}), listed(samples)
    return ListedModel(made.layers, plain.objective, SEED, made.outputs, plain.batch)


def alone(make: Callable[[], nn.Module]) -> Reference:
    """The module itself, in one process."""
    module, clock = make().double(), DropoutClock(SEED)
    for path, inner in list(module.named_modules()):
        if isinstance(inner, nn.Dropout):
            parent, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(parent), leaf, Flat(inner.p, path, clock, torch.empty(0)))

    def forward(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs = module(batch["ids"], weight=batch["weight"]) if make is written else (module(batch["input"]),)
        return dict(zip(("scores", "extra"), outputs, strict=False))

    return steps(forward, dict(module.named_parameters()), clock)


def off(make: Callable[[], nn.Module], layout: Layout, before: Callable[[], None] = lambda: None) -> float:
    return distance(layout, before, partial(parts, make), partial(alone, make))


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


@pytest.mark.parametrize("broken", [no_sum_over_ties, no_gradient_of_the_skip, other_buffers, dropout_by_part])
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
    InPlace: "changes part0.words in place: which is another layer's",
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
        ListedModel(made.layers, plain.objective, SEED, made.outputs, batch, made.defaults).traced  # noqa: B018


def test_a_cut_of_no_module_is_refused() -> None:
    with pytest.raises(HpcMpError, match=r"cut = \*.side: matches no module of it"):
        layers_of(row(), cut={"*.up": "column", "*.side": "row"})


def test_what_a_forward_returns_is_made_again() -> None:
    made, (scores, extra) = layers_of(written()), torch.ones(2, 3)
    assert made.returned(dict(zip(made.outputs, (scores, extra), strict=True))) == (scores, extra)
