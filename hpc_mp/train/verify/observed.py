"""The numbers of a training that a verification compares, and the modules whose outputs it has noted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpc_mp.layout.flat import Box
from hpc_mp.layout.models import Family
from hpc_mp.train.model.counter_random import key_of, normal
from hpc_mp.train.parallel.fill import Source

INPUT = "the input of "  # before the name of the first layer: what the forward made of the embeddings
DEVIATION, SMALL = 0.15, 0.1  # of drawn matrices, and of vectors


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a module for some tokens: positions of samples, positions in them, (samples, tokens, numbers)."""

    samples: tuple[int, ...]
    places: NDArray[Any]
    values: NDArray[Any]


@dataclass(slots=True)
class Observed:
    """The numbers that one process has computed.

    Attributes:
        losses, norms: of every step.
        outputs: of modules in the forwards of the first step, by name, in the order of their ends.
        gradients: of the first step, before their clipping: name of a parameter, rectangle of it, values.
        order: names of all modules in the order of their ends in a forward; only of Hugging Face's model.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    gradients: list[tuple[str, Box, NDArray[Any]]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)


def watched(family: Family, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose outputs are compared: the embedding, layers with the modules in them, and the last norm."""
    ends = (family.norm,) if family.decoder is not None else (family.embedding, family.norm)
    for name, module in root.named_modules():
        *_, inner = family.in_block(name) or (None,)
        depth = family.depth + 1 if inner is None else inner.count(".") + bool(inner)
        if name in ends or (depth <= family.depth and not isinstance(module, nn.ModuleList)):
            yield name, module


def hidden_of(values: Any) -> Tensor | None:
    """Return the hidden states among the arguments of a layer, or in its output."""
    first = next((value for value in values if isinstance(value, Tensor)), None) if isinstance(values, tuple) else values
    return first if isinstance(first, Tensor) and first.dim() == 3 else None


def drawn(seed: int) -> Source:
    """Return a source of values by name and place, in which nothing is zero or one: no bias and no norm without an effect."""

    def source(weight: Any, box: Box) -> Tensor:
        values = torch.from_numpy(normal(key_of(seed, weight.name), weight.shape, box)).double()
        if len(weight.shape) == 1:
            return values * SMALL + (1.0 if weight.init == "ones" else 0.0)
        return values * DEVIATION

    return source


def whole(shape: Sequence[int]) -> Box:
    return tuple(slice(0, size) for size in shape)

