"""First values of the parameters: drawn from seed and name, or read as slices of a safetensors checkpoint.

Both depend on a parameter's name and global index only, so every layout starts from the same model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models import Weight
from hpc_mp.train.engine.shard_layout import Box, local_box
from hpc_mp.train.engine.stage import Stage


@torch.no_grad()
def fill(stage: Stage, source: Callable[[Weight, Box], Tensor]) -> None:
    """Give every parameter (already on its device) its first values."""
    for name, parameter in stage.named_parameters():
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if target.numel():
            target.copy_(source(stage.weights[name], local_box(parameter)))


def drawn(seed: int, layers: int, initializer_range: float, padding: dict[str, int]) -> Callable[[Weight, Box], Tensor]:
    """Random first values: the whole tensor in fp32 on the CPU from a generator seeded with (seed, name), then cut.

    Normal with ``initializer_range``; projections that write into the residual stream are divided by sqrt(2 x layers)
    where the family asks for it (GPT-2, and transformers' ``_init_weights``). ``padding``: embedding name -> its zero row.
    """

    def source(weight: Weight, box: Box) -> Tensor:
        if weight.init == "ones":
            return torch.ones(weight.shape)[box]
        if weight.init == "zeros":
            return torch.zeros(weight.shape)[box]
        digest = hashlib.blake2b(f"{seed}:{weight.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        scale = initializer_range / math.sqrt(2 * layers) if weight.init == "residual" else initializer_range
        values = torch.empty(weight.shape).normal_(0.0, scale, generator=generator)
        if weight.name in padding:
            values[padding[weight.name]] = 0.0
        return values[box]

    return source


def read(directory: Path, prefixes: tuple[str, ...]) -> Callable[[Weight, Box], Tensor]:
    """First values from a Hugging Face checkpoint; only the slices that a rank holds are read.

    A fused weight, (in, n, out) in the engine, lies there as (in, n x out).
    """
    where = _files(directory)
    handles: dict[Path, safe_open] = {}

    def source(weight: Weight, box: Box) -> Tensor:
        names = [weight.name, *(weight.name.removeprefix(prefix) for prefix in prefixes)]
        found = next((name for name in names if name in where), None)
        if found is None:
            raise HpcMpError(f"model.pretrained = {directory}", f"holds no weight named {weight.name}",
                             "give the checkpoint of a causal language model of this family")
        path = where[found]
        if path not in handles:
            handles[path] = safe_open(str(path), framework="pt")
        stored = handles[path].get_slice(found)
        shape = tuple(stored.get_shape())
        if shape == weight.shape:
            return stored[box]
        if shape == (*weight.shape[:-2], weight.shape[-2] * weight.shape[-1]):
            width, inner = weight.shape[-1], box[-1]
            parts = [stored[(*box[:-2], slice(n * width + inner.start, n * width + inner.stop))]
                     for n in range(box[-2].start, box[-2].stop)]
            return torch.stack(parts, dim=-2)
        raise HpcMpError(f"{path}: {found}", f"has the shape {shape}, the model's configuration asks for {weight.shape}",
                         "give a config.json that belongs to these weights")

    return source


def _files(directory: Path) -> dict[str, Path]:
    """Weight name -> file, from the index or from the files themselves."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in mapping.items()}
    where: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            where |= dict.fromkeys(file.keys(), path)
    return where
