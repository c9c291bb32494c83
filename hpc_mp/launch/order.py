"""In which letter order the ranks of a job are laid out, and why."""

from __future__ import annotations

from math import prod

from hpc_mp.job import JobSpec
from hpc_mp.models import ModelShape, family_of
from hpc_mp.placement import Degrees, choose_order, normalize_order, traffic

ELEMENT = {"fp64": 8, "fp32": 4, "bf16": 2}  # bytes of one activation or gradient element on the wire


def degrees(spec: JobSpec) -> Degrees:
    p = spec.parallel
    return Degrees(tensor=p.tensor, pipeline=p.pipeline, data=spec.data_degree, context=p.context, expert=p.expert)


def settle_order(spec: JobSpec, shape: ModelShape, layers: tuple[int, ...]) -> tuple[str, str]:
    """The letters and the reason; ``auto`` takes the order with the least time on the busiest node's link.

    Args:
        layers: of every stage.
    """
    asked, p = spec.parallel.order, spec.parallel
    if asked != "auto":
        return normalize_order(asked, p.context), f"parallel.order = {asked}"
    moved = traffic(
        degrees(spec), hidden=shape.hidden, sequence=spec.data.sequence_length, zero=p.zero,
        microbatch_size=spec.microbatch_size, microbatches=spec.microbatches, layers_per_stage=max(layers),
        stage_parameters=_largest_stage(shape, layers, p.tensor), bytes_per_element=ELEMENT[spec.train.precision])
    order, costs = choose_order(degrees(spec), moved, spec.job.ranks_per_node)
    if spec.job.nodes == 1:
        return order, "one node: no traffic leaves it"
    loads = [cost.load.total / 1e6 for cost in costs]
    return order, f"{min(loads):,.1f} MB leave the busiest node per step, in the worst order {max(loads):,.1f} MB"


def _largest_stage(shape: ModelShape, layers: tuple[int, ...], tensor: int) -> int:
    """Parameters that a rank of the largest stage holds after the tensor cut."""
    family, begin, largest = family_of(shape.model_type), 0, 0
    for stage, count in enumerate(layers):
        last = stage == len(layers) - 1
        weights = family.stage_weights(shape, range(begin, begin + count), stage == 0, last)
        largest = max(largest, sum(prod(w.shape) // (1 if w.cut is None else tensor) for w in weights))
        begin += count
    return largest
