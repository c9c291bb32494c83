"""Modules of a user: one forward with places to cut, and an ``nn.Sequential``; on ranks, and by themselves in one process."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from beside import SEED, STEPS, Reference, drop_flat
from lists import WIDTH, WORDS, Block, Join, Split, Words, distance, listed, steps
from torch import Tensor, nn

from hpc_mp.layout.layout import Layout
from hpc_mp.train.model.cut_points import CutPoint, layers_of
from hpc_mp.train.model.layer_list import Cut
from hpc_mp.train.model.listed_stage import ListedModel
from hpc_mp.train.parallel.dropout import DropoutClock

CUT: Mapping[str, Cut] = {"*up": "column", "*down": "row"}


class Trunk(nn.Module):
    """Has a marker inside, in a loop, and a parameter of its own between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.cut: nn.Module = CutPoint()
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
        (samples, length), seen = ids.shape, ids > 2
        hidden, skip = self.split(self.cut(self.words(ids)))
        if mask is not None:
            hidden = hidden * mask
        hidden = self.trunk(hidden + self.shift, weight=weight) * self.slope
        hidden, extra = self.join(self.cut(hidden.view(samples * length, -1)).view(samples, length, -1), skip)
        peek = hidden @ self.head.weight.t() * self.heat
        hidden = self.cut(hidden + scale * peek.softmax(-1) @ self.words.weight)
        hidden = hidden * torch.linspace(0.9, 1.1, hidden.shape[-1]) * seen.unsqueeze(-1)
        return self.head(hidden) * self.heat, extra


def written() -> Written:
    torch.manual_seed(5)
    module = Written()
    nn.init.normal_(module.head.weight)
    return module


def fewer() -> Written:
    """The same with fewer markers."""
    module = written()
    module.trunk.cut = nn.Identity()
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
    """A module as a model of the engine."""
    module, plain = make(), listed(samples)
    made = layers_of(module, cut=CUT if isinstance(module, Written | nn.Sequential) else {})
    return ListedModel(made.layers, plain.objective, SEED, made.outputs, plain.batch)


def alone(make: Callable[[], nn.Module], count: int = STEPS, apart: int = 0) -> Reference:
    """The module itself, in one process. ``apart``: as for ``steps``."""
    module, clock = make().double(), DropoutClock(SEED)
    drop_flat(module, clock)

    def forward(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        row = isinstance(module, nn.Sequential)
        outputs = (module(batch["input"]),) if row else module(batch["ids"], weight=batch["weight"])
        return dict(zip(("scores", "extra"), outputs, strict=False))

    return steps(forward, module, clock, count, apart)


def off(make: Callable[[], nn.Module], layout: Layout, before: Callable[[], None] = lambda: None) -> float:
    """Return the largest difference between a module on a layout and itself."""
    return distance(layout, before, partial(parts, make), partial(alone, make))
