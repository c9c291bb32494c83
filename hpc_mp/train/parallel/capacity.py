"""Capacity: the limit of the choices that an expert takes; choices beyond it are dropped.

An expert takes the choices *of each sample* at the earliest positions (``docs/user/models.md`` has the rule, and compares it with
those of other frameworks). So the drops depend on the sample alone: not on the number of microbatches, nor on the ranks that hold
samples, tokens or experts. They do not depend on later tokens either, so that a model remains causal. A token chooses an expert
once at most, so that its choices do not compete. The number of an expert's rows follows routing. Only what ranks of the expert
axis send each other is filled up to the capacity, see ``expert_axis``.

Ranks that share the tokens of samples exchange the choices of all tokens, in an all-reduce of 4 bytes a choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hpc_mp.train.parallel.collectives import sum_over
from hpc_mp.train.parallel.custom_backward import with_backward
from hpc_mp.train.parallel.groups import Axis


def kept(index: Tensor, limit: int) -> Tensor:
    """Return a mask of the choices that experts take, (samples, tokens, choices). ``index``: numbers of the chosen experts,
    (samples, tokens, choices). ``limit``: number of choices that an expert takes of each sample, the first ones."""
    chosen = index.flatten(1)
    by_expert, order = chosen.sort(dim=1, stable=True)
    first = torch.searchsorted(by_expert, by_expert)  # begin of the choices of the same expert
    taken = torch.arange(chosen.shape[1], device=index.device) - first < limit
    return torch.empty_like(taken).scatter_(1, order, taken).view_as(index)


class Capacity:
    """The capacity of the experts in all blocks of a rank. ``limit``: number of choices that an expert takes of a sample; None:
    all. ``samples``: number of samples in a microbatch. ``total``: (2,), dropped choices and all choices of a step, as far as its
    backwards have run; both 0 without a capacity."""

    def __init__(self, limit: int | None, samples: int, device: torch.device) -> None:
        self.limit, self.samples = limit, samples
        self.total = torch.zeros(2, dtype=torch.float64, device=device)

    def begin(self) -> None:
        """Reset ``total`` at the beginning of a step."""
        self.total = torch.zeros_like(self.total)

    def count(self, drops: Tensor, gradient: Tensor) -> Tensor:
        """Add ``drops`` to ``total``, in a backward: once, however often the block is computed. Return the gradient unchanged."""
        self.total = self.total + drops
        return gradient


@dataclass(frozen=True, slots=True)
class Intake:
    """The intake of the experts of a block from this rank's tokens."""

    capacity: Capacity
    # sequence: number of tokens in a whole sample; ``positions``: positions of this rank's tokens in it
    sequence: int
    positions: Tensor
    sharers: Sequence[Axis]  # axes whose ranks have other tokens of the same samples
    counts: bool  # True if this rank reports the drops; other ranks may compute the same ones

    @property
    def rows(self) -> int | None:
        """The largest number of rows that an expert receives of a microbatch; None: no limit."""
        return None if self.capacity.limit is None else self.capacity.limit * self.capacity.samples

    def apply(self, index: Tensor, weights: Tensor, none: int) -> tuple[Tensor, Tensor]:
        """Return the index with ``none`` in place of dropped choices, and the weights, whose values do not change. ``index``,
        ``weights``: (tokens, choices), this rank's tokens, sample by sample."""
        if self.capacity.limit is None:
            return index, weights
        own = index.unflatten(0, (self.capacity.samples, -1))
        everyone = torch.zeros(own.shape[0], self.sequence, own.shape[2], dtype=torch.int32, device=index.device)
        everyone[:, self.positions] = own.int()
        taken = kept(sum_over(everyone, self.sharers), self.capacity.limit)[:, self.positions].flatten(0, 1)
        if self.counts:
            drops = torch.stack(((~taken).sum(), torch.full((), taken.numel(), device=index.device))).double()
            weights = with_backward(lambda weights: weights, partial(self.capacity.count, drops), weights)
        return index.masked_fill(~taken, none), weights
