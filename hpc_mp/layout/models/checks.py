"""Can this model be cut as the job asks? Pure arithmetic over its shape."""

from __future__ import annotations

import math

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.errors import shown
from hpc_mp.layout.models.shape import ModelShape


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """How ``torch.chunk`` cuts: ceil(size / parts) each while some is left; the last parts may be smaller or empty."""
    step = -(-size // parts)
    return tuple(max(0, min(step, size - part * step)) for part in range(parts))


def check_layout(shape: ModelShape, spec: JobSpec) -> None:
    """Raises HpcMpError, with the arithmetic, when the model cannot be cut as ``spec.parallel`` asks."""
    tensor, pipeline, partition = spec.parallel.tensor, spec.parallel.pipeline, spec.parallel.partition
    if spec.data.sequence_length > shape.positions:
        raise HpcMpError(f"data.sequence_length = {spec.data.sequence_length}",
                         f"is longer than the model's {shape.positions} positions",
                         f"use at most {shape.positions}, or a model with more positions")
    if pipeline > shape.layers:
        raise HpcMpError(f"parallel.pipeline = {pipeline}", f"is more stages than the model's {shape.layers} layers",
                         f"use at most {shape.layers} stages")
    if partition != "auto" and sum(partition) != shape.layers:
        raise HpcMpError(f"parallel.partition = {shown(partition)}",
                         f"has {sum(partition)} layers, the model has {shape.layers}",
                         "change the layers of a stage so that the sum is right")
    for what, count in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
        if count % tensor:
            raise HpcMpError(f"parallel.tensor = {tensor}", f"does not divide the model's {count} {what}",
                             f"use a divisor of {math.gcd(shape.heads, shape.kv_heads)}: heads are never split")
    for what, size in (("vocabulary", shape.vocabulary), ("intermediate size", shape.intermediate)):
        empty = chunk_sizes(size, tensor).count(0)
        if empty:
            raise HpcMpError(f"parallel.tensor = {tensor}", f"cuts the {what} of {size} into pieces of "
                             f"{-(-size // tensor)}, so that {empty} of {tensor} ranks get nothing",
                             "use fewer tensor ranks")
