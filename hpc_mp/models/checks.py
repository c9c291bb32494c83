"""Can this model be cut as the job asks? Pure arithmetic over its shape."""

from __future__ import annotations

from hpc_mp.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.models.shape import ModelShape


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """How ``torch.chunk`` cuts: ceil(size / parts) each until nothing is left, so the last parts may be smaller or empty."""
    step = -(-size // parts)
    return tuple(max(0, min(step, size - part * step)) for part in range(parts))


def check_layout(shape: ModelShape, spec: JobSpec) -> None:
    """Raises HpcMpError, with the arithmetic, when the model cannot be cut as ``spec.parallel`` asks."""
    tensor, pipeline = spec.parallel.tensor, spec.parallel.pipeline
    if spec.data.sequence_length > shape.positions:
        raise HpcMpError(f"data.sequence_length = {spec.data.sequence_length}",
                         f"is longer than the model's {shape.positions} positions",
                         f"use at most {shape.positions}, or a model with more positions")
    if pipeline > shape.layers:
        raise HpcMpError(f"parallel.pipeline = {pipeline}", f"is more stages than the model has layers ({shape.layers})",
                         f"use at most {shape.layers} stages")
    if spec.parallel.partition != "auto" and sum(spec.parallel.partition) != shape.layers:
        total = " + ".join(map(str, spec.parallel.partition))
        raise HpcMpError(f"parallel.partition: {total} = {sum(spec.parallel.partition)}",
                         f"does not give the model's {shape.layers} layers", "mend the layers per stage")
    for what, count in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
        if count % tensor:
            raise HpcMpError(f"parallel.tensor = {tensor}", f"does not divide the model's {count} {what}",
                             f"use a divisor of {count}: heads are never split")
    for what, size in (("vocabulary", shape.vocabulary), ("intermediate size", shape.intermediate)):
        cut = chunk_sizes(size, tensor)
        if 0 in cut:
            raise HpcMpError(f"parallel.tensor = {tensor}", f"cuts the {what} of {size} into {cut}: a rank would get nothing",
                             "use fewer tensor ranks")
