"""First values of the parameters: drawn from seed and name, or read as slices of a safetensors checkpoint.

Both depend on a parameter's name and global index only, so every layout starts from the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor

from hpc_mp.layout.flat import Box, pieces
from hpc_mp.layout.models import Family, Weight
from hpc_mp.layout.models.weight_files import stored_parts, weight_files
from hpc_mp.train.engine.counter_random import key_of, normal
from hpc_mp.train.engine.data_axis import Unit

CHUNK = 1 << 22  # elements that are made at once: 16 MB of fp32 beside the parameters, however large they are

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # of an element of a checkpoint
MAPPED = 1 << 26  # bytes of a checkpoint's files that stay mapped, and so count as this process's memory, before they are let go

Source = Callable[[Weight, Box], Tensor]  # the values of a part of a weight


@torch.no_grad()
def fill(units: Iterable[Unit], source: Source) -> None:
    """Give this rank's part of every unit its first values."""
    for unit in units:
        for piece in unit.layout.pieces(unit.shard.rank):
            target = unit.master[piece.begin:piece.begin + piece.size].view(piece.shape)
            fill_part(target, piece.slot.weight, piece.box, source)


def fill_part(target: Tensor, weight: Weight, box: Box, source: Source) -> None:
    """Give the part of a weight that lies in ``box`` its values, a few rows at a time."""
    for some in pieces(tuple(target.shape), CHUNK):
        there = tuple(slice(whole.start + part.start, whole.start + part.stop) for whole, part in zip(box, some, strict=True))
        target[some].copy_(source(weight, there))


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
    """First values from a Hugging Face checkpoint, which rank 0 has checked; only the slices that a rank holds are read."""
    files = weight_files(directory)
    handles: dict[Path, safe_open] = {}
    mapped = 0

    def one(weight: Weight, at: tuple[int, ...], name: str, box: Box) -> Tensor:
        nonlocal mapped
        if mapped > MAPPED:  # pages stay as long as their file is open
            handles.clear()
            mapped = 0
        path = files[name]
        if path not in handles:
            handles[path] = safe_open(str(path), framework="pt")
        stored = handles[path].get_slice(name)
        inner, sizes = box[len(at):], stored.get_shape()
        # A part of each row touches the pages of whole rows.
        mapped += (inner[0].stop - inner[0].start) * math.prod(sizes[1:]) * BYTES[stored.get_dtype()]
        if tuple(sizes) == weight.shape[len(at):]:
            return cast(Tensor, stored[inner])
        assert weight.cut  # it is stored as its ``fused_shape``
        before, width, wanted = weight.cut - 1, weight.shape[weight.cut], box[weight.cut]
        parts = [stored[(*box[:before], slice(n * width + wanted.start, n * width + wanted.stop), *box[weight.cut + 1:])]
                 for n in range(box[before].start, box[before].stop)]
        return torch.stack(parts, dim=before)

    def source(weight: Weight, box: Box) -> Tensor:
        parts = [one(weight, at, name, box) for at, name in stored_parts(weight, files, family)
                 if all(part.start <= index < part.stop for index, part in zip(at, box, strict=False))]
        return torch.cat([part.flatten() for part in parts]).view([part.stop - part.start for part in box])

    return source
