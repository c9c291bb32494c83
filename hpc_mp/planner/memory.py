"""Bytes of model state per rank: parameters, gradients and optimizer state; activations are not counted here."""

from __future__ import annotations

from math import prod

from hpc_mp.job import JobSpec
from hpc_mp.layout.models import Family, ModelShape, Weight, chunk_sizes, family_of
from hpc_mp.rundir.plan import StateBytes

# precision -> bytes of a master parameter, of a parameter as computed with, of a gradient as it is accumulated
BYTES = {"fp64": (8, 8, 8), "fp32": (4, 4, 4), "bf16": (4, 2, 4)}
SLOTS = {"adamw": 2, "sgd": 0}  # tensors of optimizer state per parameter, in the master's format


def state_bytes(shape: ModelShape, spec: JobSpec, layers: tuple[int, ...]) -> dict[tuple[int, int], StateBytes]:
    """State of the ranks at (pipeline, tensor) coordinates; ranks of the data axis hold as much as their first one.

    Stage by stage as ``engine/zero.py`` holds it: with ZeRO-0 everything once; with ZeRO-1 to 3 the rank's part of
    masters and optimizer state, besides the whole parameters (ZeRO-3: the largest block and the outer weights) and
    gradients of the stage (ZeRO-2 and 3: of the unit whose backward runs) while a step computes.

    Args:
        layers: of every stage.
    """
    family = family_of(shape.model_type)
    result = {}
    for stage in range(spec.parallel.pipeline):
        begin = sum(layers[:stage])
        first, last = stage == 0, stage == spec.parallel.pipeline - 1
        weights = family.stage_weights(shape, range(begin, begin + layers[stage]), first, last)
        for tensor in range(spec.parallel.tensor):
            result[stage, tensor] = _rank_bytes(family, weights, spec, tensor)
    return result


def _rank_bytes(family: Family, weights: tuple[Weight, ...], spec: JobSpec, tensor: int) -> StateBytes:
    master, computed, gradient = BYTES[spec.train.precision]
    slots = SLOTS[spec.train.optimizer] + (spec.train.optimizer == "sgd" and spec.train.momentum > 0)
    shards = spec.shard_degree
    whole = sum(elements(w, spec, tensor, 1) for w in weights)
    part = sum(elements(w, spec, tensor, shards) for w in weights)
    if master == computed and (spec.parallel.zero == 0 or spec.data_degree == 1):
        return StateBytes(whole * master, whole * gradient, whole * slots * master)
    units: dict[str, int] = {}
    for weight in weights:
        units.setdefault(_unit(family, weight), 0)
        units[_unit(family, weight)] += elements(weight, spec, tensor, 1)
    outer = units.pop("", 0)
    largest = max(units.values(), default=0)
    gathered = outer + largest if spec.parallel.zero == 3 else whole
    flowing = whole if spec.parallel.zero <= 1 else outer + largest
    return StateBytes(part * master + gathered * computed, part * master + flowing * gradient, part * slots * master)


def _unit(family: Family, weight: Weight) -> str:
    """The block that a weight belongs to, "" for embedding, norm and head."""
    prefix = f"{family.blocks}."
    return weight.name.removeprefix(prefix).split(".")[0] if weight.name.startswith(prefix) else ""


def elements(weight: Weight, spec: JobSpec, tensor: int, shards: int) -> int:
    """Elements of a weight on a tensor rank and on the first, the fullest, of ``shards`` ranks along the data axis."""
    shape = list(weight.shape)
    if weight.cut is not None:
        shape[weight.cut] = chunk_sizes(shape[weight.cut], spec.parallel.tensor)[tensor]
    shape[0] = chunk_sizes(shape[0], shards)[0]
    return prod(shape)
