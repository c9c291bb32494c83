"""Dropout that is the same on every layout: the mask is an integer hash, not a random stream.

A hash of (seed, step, site, global sample position, element index) decides whether an element is dropped, so that a rank that
holds a slice draws exactly its part of the mask of a single process.
"""

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpc_mp.train.device.readback import to_device
from hpc_mp.train.parallel.masks import Visible
from hpc_mp.train.parallel.projection import TensorAxis
from hpc_mp.train.parallel.soft_cap import capped

ATTENTION = "hpc_mp_eager"  # name of the engine's attention function in transformers' table


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of training: the optimizer step, and the global positions of a microbatch's samples. It travels with them."""

    step: int
    samples: tuple[int, ...]


@dataclass
class DropoutClock:
    """The current moment. The driver sets it before every forward, and before every backward for its recomputations."""

    seed: int
    moment: Moment = field(default_factory=lambda: Moment(0, ()))
    keys: dict[int, Tensor] = field(default_factory=dict)

    def set(self, moment: Moment) -> None:
        if moment != self.moment:
            self.moment, self.keys = moment, {}

    def site_keys(self, site: int, device: torch.device) -> Tensor:
        """Return two 32-bit keys per sample, (2, samples), int32."""
        if site not in self.keys:
            pairs = [struct.unpack("<2i", hashlib.blake2b(struct.pack("<4q", self.seed, self.moment.step, site, sample),
                                                          digest_size=8).digest()) for sample in self.moment.samples]
            self.keys[site] = to_device(torch.tensor(pairs, dtype=torch.int32).t().contiguous(), device)
        return self.keys[site]


class HashDropout(nn.Module):
    """Replacement of ``nn.Dropout``. ``site``: the module's Hugging Face name. ``rows``: positions of this rank's tokens, or
    heads, in the whole sample: indexes along the dimension behind the samples. ``times``: calls in a forward, each of which
    drops other elements."""

    def __init__(self, p: float, site: str, clock: DropoutClock, rows: Tensor, times: int = 1) -> None:
        super().__init__()
        self.p, self.clock, self.rows, self.calls = p, clock, rows, 0
        self.sites = [zlib.crc32(name.encode()) for name in call_names(site, times)]

    @property
    def site(self) -> int:
        """The site of the next call."""
        return self.sites[self.calls % len(self.sites)]

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of x, (samples, rows, …)."""
        if self.p == 0.0 or not self.training:
            return x
        within = torch.arange(x.shape[2:].numel(), dtype=torch.int32, device=x.device)
        index = (self.rows * len(within)).to(torch.int32).unsqueeze(1) + within
        return self.dropped(x, index.view(x.shape[1:]))

    def dropped(self, x: Tensor, index: Tensor) -> Tensor:
        """Drop elements of x, (samples, …), by their indexes within a sample, (…), int32."""
        site, self.calls = self.site, self.calls + 1
        if self.p == 0.0 or not self.training:
            return x
        return torch.where(keep(self.clock.site_keys(site, x.device), index, self.p), x / (1.0 - self.p), 0.0)


class WideDropout(HashDropout):
    """Dropout of any tensors (samples, …), which tensor ranks may cut along any dimension. ``site``: its name in the model.
    ``shapes``: of what each of its calls in a forward drops in the whole model, without samples. ``tensor``: the axis whose ranks
    have parts of these."""

    def __init__(self, p: float, site: str, clock: DropoutClock, shapes: Sequence[tuple[int, ...]], tensor: TensorAxis) -> None:
        super().__init__(p, site, clock, torch.empty(0), len(shapes))
        self.shapes, self.tensor = shapes, tensor

    def forward(self, x: Tensor) -> Tensor:
        index = torch.zeros((), dtype=torch.int32, device=x.device)
        for size, whole in zip(x.shape[1:], self.shapes[self.calls % len(self.shapes)], strict=True):
            begin = 0 if size == whole else self.tensor.part(whole)[0]
            index = index.unsqueeze(-1) * whole + torch.arange(begin, begin + size, dtype=torch.int32, device=x.device)
        return self.dropped(x, index)

    def restart(self, *_: object) -> None:
        """Begin a forward, in a hook of the layer."""
        self.calls = 0


def call_names(site: str, times: int) -> list[str]:
    """Return the names of the calls of a dropout in a forward."""
    return [site, *(f"{site} {call}" for call in range(1, times))]


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Visible | None, scaling: float,
              dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
              **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Attention by plain products with layout-independent dropout on the weights.

    Args:
        module: has its HashDropout as ``attention_site``, see ``build_stage``.
        query: (batch, this rank's heads, sequence, head_dim); key, value: the same with key-value heads.
        attention_mask: what tokens see; None: attention is causal if the module is, as with torch's fused attention.
        softcap: see ``soft_cap``.
        s_aux: score of a further key of each head, the sink, whose value is 0, (this rank's heads,).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length = query.shape[2]
    scores = capped(query @ key.transpose(2, 3) * scaling, softcap)
    if attention_mask is not None:
        scores = scores + attention_mask.mask(scores.dtype)
    elif module.is_causal:
        visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.to(scores).view(1, -1, 1, 1).expand(len(scores), -1, length, 1)), 3)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)[..., :key.shape[2]]
    weights = cast(HashDropout, module.attention_site)(weights)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def keep(keys: Tensor, index: Tensor, probability: float) -> Tensor:
    """Return a mask of the elements that dropout keeps, (samples, …). The hash is two keyed rounds of murmur3's 32-bit finalizer
    over the element index. Two independent keys, one per round, make masks of different samples unrelated; with one key they
    would be permutations of each other. ``keys``: two keys of each sample, (2, samples), int32. ``index``: indexes of the
    elements within a sample, (…), int32."""
    first, second = (key.view(-1, *[1] * index.dim()) for key in keys)
    x = _mix_(index ^ first)
    x = _mix_(x.bitwise_xor_(second))
    return x >= round(probability * 2**32) - 2**31


def _mix_(x: Tensor) -> Tensor:
    """Apply murmur3's fmix32 (public domain, Austin Appleby) in place to int32 tensors, whose products wrap."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(-2048144789)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(-1028477387)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
