"""Dropout that is the same on every layout: the mask is an integer hash, not a random stream.

An element is kept or dropped by a hash of (seed, step, site, global sample position, element index), so that a rank
that holds a slice draws exactly its part of what one process would draw.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "hpc_mp_eager"  # our attention function's name in transformers' table


@dataclass
class DropoutClock:
    """Where training is; the driver sets it before every forward. ``samples``: global positions of the microbatch."""

    seed: int
    step: int = 0
    samples: tuple[int, ...] = ()
    keys: dict[int, Tensor] = field(default_factory=dict)

    def set(self, step: int, samples: tuple[int, ...]) -> None:
        self.step, self.samples, self.keys = step, samples, {}

    def site_keys(self, site: int, device: torch.device) -> Tensor:
        """Two 32-bit keys per sample, shape (2, samples), int32."""
        if site not in self.keys:
            pairs = [struct.unpack("<2i", hashlib.blake2b(struct.pack("<4q", self.seed, self.step, site, sample),
                                                          digest_size=8).digest()) for sample in self.samples]
            self.keys[site] = torch.tensor(pairs, dtype=torch.int32).t().contiguous().to(device)
        return self.keys[site]


class HashDropout(nn.Module):
    """Replaces ``nn.Dropout``; ``site`` is the module's Hugging Face name."""

    def __init__(self, p: float, site: str, clock: DropoutClock) -> None:
        super().__init__()
        self.p, self.clock = p, clock
        self.site = zlib.crc32(site.encode())

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x: (samples, …). ``start``: how many elements of a sample lie before this slice (of the first inner dimension)."""
        if self.p == 0.0 or not self.training:
            return x
        keep = _keep(self.clock.site_keys(self.site, x.device), x.shape, start, self.p)
        return torch.where(keep, x / (1.0 - self.p), 0.0)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Causal attention by plain products with layout-independent dropout on the weights.

    query: (batch, this rank's heads, sequence, head_dim); key, value: the same with key-value heads. The module carries
    ``attention_site`` (HashDropout) and ``first_head`` (global index of its first head), see ``stage``.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length = query.shape[2]
    scores = query @ key.transpose(2, 3) * scaling
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    site, first_head = cast(HashDropout, module.attention_site), cast(int, module.first_head)
    weights = site(weights, start=first_head * length * length)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(ATTENTION, attention)


def _keep(keys: Tensor, shape: torch.Size, start: int, probability: float) -> Tensor:
    """Boolean mask of ``shape``: two keyed rounds of murmur3's 32-bit finalizer over the element index.

    Two independent keys, one per round, make masks of different samples unrelated (with one key they would be
    permutations of each other).
    """
    count = shape[1:].numel()
    index = torch.arange(start, start + count, dtype=torch.int64, device=keys.device).to(torch.int32)
    first, second = (key.view(-1, 1) for key in keys)
    x = _mix_(index.unsqueeze(0) ^ first)
    x = _mix_(x.bitwise_xor_(second))
    threshold = round(probability * 2**32) - 2**31
    return (x >= threshold).view(shape)


def _mix_(x: Tensor) -> Tensor:
    """murmur3's fmix32 (public domain, Austin Appleby) in place on int32 tensors, whose products wrap."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(-2048144789)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(-1028477387)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
