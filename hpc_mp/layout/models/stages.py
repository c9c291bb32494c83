"""The distribution of a model's layers over the stages of a pipeline, by a measure or as the job file states.

================ =================================================================================================================
partition        stages
================ =================================================================================================================
a list           have that many layers each
at:REGEX         begin where a whole module name matches: blocks, and the last norm for a stage with only norm and head
uniform          have equal numbers of layers
parameters       have equal numbers of parameters; a tied embedding counts at both ends, which both hold it
cost, auto       have equal costs by ``layer_costs``
profile          are equal by measured seconds and bytes, see ``model_profile``
================ =================================================================================================================

A measure counts embedding, blocks, and norm with head; ``partition`` cuts so that the largest stage is as small as possible. The
first and the last stage may have no layer, if the job file states it or if it balances better.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.errors import shown
from hpc_mp.job.values import AT
from hpc_mp.layout.models.family import Family, Weight
from hpc_mp.layout.models.model_profile import ModelProfile, read_profile, shares
from hpc_mp.layout.models.shape import ModelShape
from hpc_mp.layout.schedule import check_schedule, most_stages, partition

FEW = 8  # limit of stages whose balance is listed one by one


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

    They are two per weight of every matrix product and token, plus the attention products with the visible tokens (causal: half
    the sequence), as in the appendix of "Training Compute-Optimal Large Language Models" (arXiv:2203.15556). Only the experts
    that a token uses count. The embedding is a look-up and costs nothing by that count.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = (3 if shape.gated_mlp else 2) * shape.hidden * shape.intermediate
    if shape.experts:
        mlp = shape.experts_per_token * mlp + shape.hidden * shape.experts
    weights = shape.hidden * (q + 2 * kv) + q * shape.hidden + mlp
    window = min(sequence_length, shape.window or sequence_length)
    attention = 2 * 2 * q * window * (1 - window / (2 * sequence_length))
    return LayerCosts(0.0, (2.0 * weights + attention,) * shape.layers, 2.0 * shape.hidden * shape.vocabulary)


def _parameters(family: Family, shape: ModelShape) -> LayerCosts:
    return LayerCosts(_count(family.embedding_weights(shape)), (_count(family.block_weights(shape)),) * shape.layers,
                      _count(family.norm_weights(shape)) + _count(family.head_weights(shape)))


def _count(weights: Iterable[Weight]) -> float:
    return float(sum(prod(weight.shape) for weight in weights))


def _profile(spec: JobSpec, shape: ModelShape) -> LayerCosts:
    embedding, block, head = shares(read_profile(spec, shape), shape.layers, spec.memory_weight)
    return LayerCosts(embedding, (block,) * shape.layers, head)


# name of the balanced quantity, and its measure
Measure = tuple[str, Callable[[Family, ModelShape, JobSpec], LayerCosts]]
COST: Measure = ("cost", lambda family, shape, spec: layer_costs(shape, spec.data.sequence_length))
# by method
MEASURES: Mapping[str, Measure] = {
    "auto": COST, "cost": COST,
    "uniform": ("numbers of layers", lambda family, shape, spec: LayerCosts(0.0, (1.0,) * shape.layers, 0.0)),
    "parameters": ("numbers of parameters", lambda family, shape, spec: _parameters(family, shape)),
    "profile": ("measured time and memory", lambda family, shape, spec: _profile(spec, shape)),
}


def cut_stages(family: Family, shape: ModelShape, spec: JobSpec) -> StageCut:
    """Return the layers of every global stage, as ``parallel.partition`` requires.

    A resolved job states them. They are computed for a job that has just been written, and for ranks started by hand. Raises
    HpcMpError for a pattern that names too few or too many stages, a profile that is missing or of something else.
    """
    requested = spec.parallel.partition
    if not isinstance(requested, str):
        return StageCut(requested, "as given")
    if requested.startswith(AT):
        return _at(requested, family, shape, spec.stages)
    what, measure = MEASURES[requested]
    what = "measured time" if requested == "profile" and spec.memory_weight == 0 else what
    costs = measure(family, shape, spec)
    layers = partition(costs.blocks, spec.stages, costs.embedding, costs.head)
    if spec.stages == 1:
        return StageCut(layers, "one stage has all layers")
    return StageCut(layers, f"the most even cut in {what}: {_balance(costs, layers)} of the mean"
                    + (_noise(read_profile(spec, shape)) if requested == "profile" else ""))


def _noise(profile: ModelProfile) -> str:
    """Return the spread of the measured seconds, which limits the accuracy of the stated balance."""
    spread = max(unit.spread for unit in (profile.embedding, profile.block, profile.head))
    return f"; the seconds of a unit vary by {100 * spread:.0f} %" if spread else ""


def _balance(costs: LayerCosts, layers: Sequence[int]) -> str:
    """Return the costs of the stages relative to their mean."""
    ends = accumulate(layers, initial=0)
    totals = [sum(costs.blocks[begin:end]) for begin, end in pairwise(ends)]
    totals[0] += costs.embedding
    totals[-1] += costs.head
    mean = sum(totals) / len(totals) or 1.0
    relative = [f"{total / mean:.2f}" for total in totals]
    return ", ".join(relative) if len(totals) <= FEW else f"{min(totals) / mean:.2f} to {max(totals) / mean:.2f}"


def _at(requested: str, family: Family, shape: ModelShape, stages: int) -> StageCut:
    names = [*(f"{family.blocks}.{layer}" for layer in range(shape.layers)), family.norm]
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


def check_stages(family: Family, shape: ModelShape, spec: JobSpec) -> None:
    """Raise HpcMpError, with the arithmetic, if the model cannot be cut into the stages that ``spec.parallel`` requires."""
    pipeline, requested = spec.parallel.pipeline, spec.parallel.partition
    if spec.data.sequence_length > shape.positions:
        raise HpcMpError(f"data.sequence_length = {spec.data.sequence_length}",
                         f"is longer than the model's {shape.positions} positions",
                         f"use at most {shape.positions}, or a model with more positions")
    if spec.stages > most_stages(shape.layers):
        per_rank = spec.stages // pipeline
        stages = "" if per_rank == 1 else f" × {per_rank} stages per rank ({spec.parallel.schedule}) = {spec.stages}"
        raise HpcMpError(f"parallel.pipeline = {pipeline}{stages}",
                         f"is more stages than the model's {shape.layers} layers, the embedding and the head can fill",
                         f"use at most {most_stages(shape.layers)} stages")
    check_schedule(spec)
    if not isinstance(requested, str) and sum(requested) != shape.layers:
        raise HpcMpError(f"parallel.partition = {shown(requested)}",
                         f"has {sum(requested)} layers, but the model has {shape.layers}",
                         "change the layers of a stage so that the sum is right")
    if isinstance(requested, str) and requested.startswith(AT):
        _at(requested, family, shape, spec.stages)
