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
    """Layers that have the same weights and the same window.

    Attributes:
        layers: their numbers.
        window: number of tokens that a token attends to; None: all earlier ones.
        experts: MLPs, of which each token uses some; 0: one for all.
        attention: False if tokens are mixed by something else.
    """

    layers: tuple[int, ...]
    parameters: int
    window: int | None
    experts: int
    attention: bool


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model.

    Attributes:
        source: a table of ours, or transformers' code.
        parameters: of the whole model, a tied weight once; ``active``: those that a token uses.
        cut: modules that tensor ranks cut, ``*`` in place of the layer.
        whole: module of a block -> the reason why it is whole on every tensor rank.
        shared: what several tensor ranks hold, with the reasons, at the largest degree.
        tensor: degrees at which ranks have equally many heads; all others up to the number of heads are possible too.
        pipeline: the largest number of stages; ``expert``: of expert ranks.
    """

    model_type: str
    architecture: str
    source: str
    parameters: int
    active: int
    embedding: int
    kinds: tuple[LayerKind, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied: bool
    cut: tuple[str, ...]
    whole: dict[str, str]
    shared: str
    tensor: tuple[int, ...]
    pipeline: int
    expert: int


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
