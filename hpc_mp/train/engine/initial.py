"""First values of the parameters: drawn from seed and name, or read as slices of a safetensors checkpoint.

Both depend on a parameter's name and global index only, so every layout starts from the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_mp.layout.models import Family, Weight
from hpc_mp.layout.models.weight_files import find, weight_files
from hpc_mp.train.engine.counter_random import key_of, normal
from hpc_mp.train.engine.shard_layout import Box, local_box
from hpc_mp.train.engine.stage import Stage

CHUNK = 1 << 22  # elements that are made at once: 16 MB of fp32 beside the parameters, however large they are

Source = Callable[[Weight, Box], Tensor]  # the values of a part of a weight


@torch.no_grad()
def fill(stage: Stage, source: Source) -> None:
    """Give every parameter (already on its device) its first values."""
    for name, parameter in stage.named_parameters():
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        fill_part(target, stage.weights[name], local_box(parameter), source)


def fill_part(target: Tensor, weight: Weight, box: Box, source: Source) -> None:
    """Give the part of a weight that lies in ``box`` its values, a few rows at a time."""
    if not target.numel():
        return
    rows = max(1, CHUNK // (target.numel() // len(target)))
    for begin in range(0, len(target), rows):
        some = slice(begin, min(begin + rows, len(target)))
        there = slice(box[0].start + some.start, box[0].start + some.stop)
        target[some].copy_(source(weight, (there, *box[1:])))


def drawn(seed: int, layers: int, initializer_range: float, padding: dict[str, int]) -> Source:
    """Random first values in fp32; each depends on the seed, the weight's name and the element's global index alone.

    Normal with ``initializer_range``; projections that write into the residual stream are divided by sqrt(2 x layers)
    where the family asks for it (GPT-2, and transformers' ``_init_weights``). ``padding``: embedding name -> its zero row.
    """
    constants = {"ones": 1.0, "zeros": 0.0}

    def source(weight: Weight, box: Box) -> Tensor:
        if weight.init in constants:
            return torch.full([part.stop - part.start for part in box], constants[weight.init])
        scale = initializer_range / math.sqrt(2 * layers) if weight.init == "residual" else initializer_range
        values = torch.from_numpy(normal(key_of(seed, weight.name), weight.shape, box)).mul_(scale)
        row = padding.get(weight.name, -1)
        if box[0].start <= row < box[0].stop:
            values[row - box[0].start] = 0.0
        return values

    return source


def read(directory: Path, family: Family) -> Source:
    """First values from a Hugging Face checkpoint; only the slices that a rank holds are read.

    A fused weight, (in, n, out) in the engine, lies there as (in, n x out).
    """
    files = weight_files(directory)
    handles: dict[Path, safe_open] = {}

    def source(weight: Weight, box: Box) -> Tensor:
        name = find(weight.name, files, family)
        assert name is not None, "rank 0 has checked the checkpoint"
        path = files[name]
        if path not in handles:
            handles[path] = safe_open(str(path), framework="pt")
        stored = handles[path].get_slice(name)
        if tuple(stored.get_shape()) == weight.shape:
            return stored[box]
        width, inner = weight.shape[-1], box[-1]
        parts = [stored[(*box[:-2], slice(n * width + inner.start, n * width + inner.stop))]
                 for n in range(box[-2].start, box[-2].stop)]
        return torch.stack(parts, dim=-2)

    return source
