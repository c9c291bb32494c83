"""The distribution of a model's layers over the stages of a pipeline, by a measure or as the job file states.

``docs/user/partition.md`` has the methods. A measure counts embedding, blocks, and norm with head; ``partition`` cuts so that the
largest stage is as small as possible.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import shown
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.model_profile import ModelProfile
from hpc_mp.layout.models import ModelShape, Weight, family_of
from hpc_mp.layout.schedule import partition
from hpc_mp.layout.schedule.names import AT

FEW = 8  # limit of stages whose balance is listed one by one


@dataclass(frozen=True, slots=True)
class Partition:
    """The request for a distribution: a method, or the layers of every stage; for "profile" the measurement, and the weight of
    memory in it, between 0 and 1."""

    method: str | tuple[int, ...]
    profile: ModelProfile | None = None
    memory_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class StageCut:
    """The layers of every stage, and the reason."""

    layers: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Costs of the embedding, each block, and norm + head + loss by one measure."""

    embedding: float
    blocks: tuple[float, ...]
    head: float


def layer_costs(shape: ModelShape, sequence_length: int) -> LayerCosts:
    """Return forward floating-point operations per token.

    They are two per weight of every matrix product and token, plus the attention products with the visible tokens (half the
    sequence if attention is causal), as in the appendix of "Training Compute-Optimal Large Language Models" (arXiv:2203.15556).
    Only the experts that a token uses count. The embedding is a look-up and costs nothing by that count.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (q + 2 * kv) + q * shape.hidden
    matrix = (3 if shape.gated_mlp else 2) * shape.hidden  # weights of an MLP for each of its inner elements

    def block(layer: int) -> float:
        mlp = matrix * shape.intermediate
        if experts := shape.experts_of(layer):
            mlp = shape.experts_per_token * matrix * shape.expert_intermediate + shape.hidden * experts
        tokens = shape.tokens_of(layer, sequence_length)
        window = min(tokens, shape.window_of(layer) or tokens)
        to_later_ones = shape.bidirectional or layer < shape.encoder
        visible = min(2 * window - 1, tokens) if to_later_ones else window * (1 - window / (2 * tokens))
        cost = 2.0 * (attention + mlp) + 2 * 2 * q * visible
        if shape.encoder and layer >= shape.encoder:
            cost += 2.0 * attention + 2 * 2 * q * shape.prompt
        return cost * tokens / sequence_length

    tokens = shape.tokens_of(shape.layers - 1, sequence_length) / sequence_length
    head = 2.0 * shape.hidden * (shape.classes or shape.vocabulary) * tokens
    return LayerCosts(0.0, tuple(map(block, range(shape.layers))), head)


def _parameters(shape: ModelShape) -> LayerCosts:
    def count(*weights: Weight) -> float:
        return float(sum(prod(weight.shape) for weight in weights))

    family = family_of(shape)
    return LayerCosts(count(*family.embedding_weights(shape)),
                      tuple(count(*family.block_weights(shape, layer)) for layer in range(shape.layers)),
                      count(*family.norm_weights(shape), *family.head_weights(shape)))


def _profile(shape: ModelShape, partition: Partition) -> LayerCosts:
    """Return ``memory_weight`` times a unit's share of the model's bytes, plus the rest of 1 times its share of the model's
    seconds, as SageMaker's ``memory_weight`` weighs them."""
    profile, weight = partition.profile, partition.memory_weight
    assert profile is not None
    units = (profile.embedding, *(profile.blocks[kind] for kind in shape.kinds), profile.head)
    seconds, size = sum(unit.seconds for unit in units) or 1.0, sum(unit.bytes for unit in units) or 1
    embedding, *blocks, head = (weight * unit.bytes / size + (1 - weight) * unit.seconds / seconds for unit in units)
    return LayerCosts(embedding, tuple(blocks), head)


# name of the balanced quantity, and its measure
Measure = tuple[str, Callable[[ModelShape, Layout, Partition], LayerCosts]]
COST: Measure = ("cost", lambda shape, layout, partition: layer_costs(shape, layout.sequence))
# by method
MEASURES: Mapping[str, Measure] = {
    "auto": COST, "cost": COST,
    "uniform": ("numbers of layers", lambda shape, layout, partition: LayerCosts(0.0, (1.0,) * shape.layers, 0.0)),
    "parameters": ("numbers of parameters", lambda shape, layout, partition: _parameters(shape)),
    "profile": ("measured time and memory", lambda shape, layout, partition: _profile(shape, partition)),
}


def cut_stages(layout: Layout, shape: ModelShape, requested: Partition) -> StageCut:
    """Return the layers of every global stage. Raises HpcMpError for a pattern that names too few or too many stages."""
    method, stages = requested.method, layout.stages
    if not isinstance(method, str):
        return StageCut(method, "as given")
    if method.startswith(AT):
        return cut_at(method, shape, stages)
    what, measure = MEASURES[method]
    what = "measured time" if method == "profile" and requested.memory_weight == 0 else what
    costs = measure(shape, layout, requested)
    layers = partition(costs.blocks, stages, costs.embedding, costs.head)
    if stages == 1:
        return StageCut(layers, "one stage has all layers")
    spread = requested.profile.spread if requested.profile else 0.0  # it limits the accuracy of the stated balance
    return StageCut(layers, f"the most even cut in {what}: {_balance(costs, layers)} of the mean"
                    + (f"; the seconds of a unit vary by {100 * spread:.0f} %" if spread else ""))


def _balance(costs: LayerCosts, layers: Sequence[int]) -> str:
    """Return the costs of the stages relative to their mean."""
    totals = [sum(costs.blocks[begin:end]) for begin, end in pairwise(accumulate(layers, initial=0))]
    totals[0] += costs.embedding
    totals[-1] += costs.head
    mean = sum(totals) / len(totals) or 1.0
    relative = [f"{total / mean:.2f}" for total in totals]
    return ", ".join(relative) if len(totals) <= FEW else f"{min(totals) / mean:.2f} to {max(totals) / mean:.2f}"


def cut_at(requested: str, shape: ModelShape, stages: int) -> StageCut:
    """Return the stages that begin where a pattern matches. Raises HpcMpError if it names too few or too many of them."""
    family = family_of(shape)
    names = [*map(family.path, range(shape.layers)), family.norm]
    pattern = re.compile(requested.removeprefix(AT))
    begins = [place for place, name in enumerate(names) if pattern.fullmatch(name)]
    if len(begins) != stages - 1:
        some = ", ".join(names[place] for place in begins[:FEW]) + ", …" * (len(begins) > FEW)
        raise HpcMpError(f"parallel.partition = {shown(requested)}",
                         f"matches {len(begins)} modules{f' ({some})' if begins else ''}, but {stages - 1} of the {stages} "
                         "stages begin at one", "name the first module of every stage but stage 0, among "
                         f"{names[0]} … {names[-2]} and {names[-1]}, by its whole name")
    layers = tuple(end - begin for begin, end in pairwise((0, *begins, shape.layers)))
    return StageCut(layers, "stages begin where the pattern matches")
