"""The description of a model for people: its size, the kinds of its layers, how it is cut, and the degrees that divide it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from hpc_mp.layout.models import FAMILIES, ModelShape, TensorCut, family_of, left_whole
from hpc_mp.layout.models.family import Weight
from hpc_mp.layout.models.tensor import head_counts, tensor_modules
from hpc_mp.layout.schedule import most_stages

TABLE, READ = "table", "read from transformers"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that have the same weights and the same window."""

    layers: tuple[int, ...]  # their numbers
    parameters: int
    window: int | None  # number of tokens that a token attends to; None: all earlier ones
    experts: int  # MLPs, of which each token uses some; 0: one for all
    attention: bool  # False if tokens are mixed by something else


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model."""

    model_type: str
    architecture: str
    source: str  # a table of ours, or transformers' code
    parameters: int  # of the whole model, a tied weight once
    active: int  # those that a token uses
    embedding: int
    kinds: tuple[LayerKind, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied: bool
    cut: tuple[str, ...]  # modules that tensor ranks cut, * in place of the layer
    whole: dict[str, str]  # module of a block -> the reason why it is whole on every tensor rank
    shared: str  # what several tensor ranks hold, with the reasons, at the largest degree
    # degrees at which ranks have equally many heads; all others up to the number of heads are possible too
    tensor: tuple[int, ...]
    pipeline: int  # the largest number of stages
    expert: int  # the largest number of expert ranks


def describe(shape: ModelShape) -> ModelDescription:
    """Return the description of a model."""
    family = family_of(shape)
    weights = family.all_weights(shape)
    idle = sum(_size(weight) // shape.experts * (shape.experts - shape.experts_per_token) for weight in weights if weight.experts)
    degrees = tuple(tensor for tensor in range(1, shape.heads + 1) if len({*head_counts(family, shape, TensorCut(tensor))}) == 1)
    modules = dict.fromkeys(family.without_layer(name)[0].format("*") for name in tensor_modules(family, shape))
    return ModelDescription(
        shape.model_type, family.architecture, TABLE if shape.model_type in FAMILIES else READ,
        sum(map(_size, weights)), sum(map(_size, weights)) - idle, sum(map(_size, family.embedding_weights(shape))),
        tuple(_kinds(shape)), shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.vocabulary, shape.positions,
        shape.tied,
        tuple(modules), {name: reason for name, reason in family.whole.items() if name in _children(shape)},
        left_whole(family, shape, TensorCut(degrees[-1])), degrees, most_stages(shape.layers), max(1, shape.experts))


def _kinds(shape: ModelShape) -> Iterator[LayerKind]:
    family = family_of(shape)
    facts = [(sum(map(_size, family.block_weights(shape, layer))), shape.window_of(layer), shape.experts_of(layer),
              layer not in family.unattended) for layer in range(shape.layers)]
    for fact in Counter(facts):
        yield LayerKind(tuple(layer for layer, other in enumerate(facts) if other == fact), *fact)


def _children(shape: ModelShape) -> set[str]:
    family = family_of(shape)
    return {weight.name.partition(".")[0] for layer in range(shape.layers) for weight in family.block_weights(shape, layer)}


def _size(weight: Weight) -> int:
    return prod(weight.shape)
