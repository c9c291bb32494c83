"""Capacity: how many choices an expert takes, and how many are dropped.

With a capacity factor C, an expert of a block takes at most ceil(C × sequence × choices of a token / experts) choices *of each
sample*: those of the earliest positions. (A token chooses an expert once at most, so that its choices do not compete.) What is
above is dropped: that choice adds nothing to what the token gets. The token's other choices keep their weights as they are, which
then sum to less than 1, and the residual carries a token that lost them all. The losses of routers count what was chosen, dropped
or not. Evaluation drops by the same rule.

Because an expert counts sample by sample, and by position, what is dropped depends on the sample alone: not on how many
microbatches there are, nor on which rank has which samples, tokens or experts. Nor does it depend on later tokens: a model
remains causal. Others count over what the router of one rank sees at once, so that the layout decides what is trained:

- Megatron-LM, ``--moe-expert-capacity-factor``: the same formula over the tokens of a rank's microbatch. With
  ``--moe-token-drop-policy probs``, its default, the choices with the lowest probabilities are dropped, later tokens considered;
  with ``position`` the last ones.
- DeepSpeed, ``capacity_factor`` (and ``eval_capacity_factor``): the same over a rank's microbatch, with a ``min_capacity``.

For a user: a skewed sample loses choices although its neighbours leave room; late tokens lose more than early ones; C ≥ experts /
choices drops nothing; and the exported model, of which transformers drops nothing, computes something else than what was trained
where much was dropped. Rows for experts are as many as routing makes, never padded to the capacity.

Where ranks share out the tokens of samples, they tell each other what all of these chose, in an all-reduce of 4 bytes a choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from hpc_mp.train.parallel.collectives import all_reduce
from hpc_mp.train.parallel.groups import Axis


def kept(index: Tensor, most: int) -> Tensor:
    """Which choices experts take. index: (samples, tokens, choices), experts by number; an expert takes the first ``most`` of a
    sample."""
    chosen = index.flatten(1)
    by_expert, order = chosen.sort(dim=1, stable=True)
    first = torch.searchsorted(by_expert, by_expert)  # where the choices of the same expert begin
    taken = torch.arange(chosen.shape[1], device=index.device) - first < most
    return torch.empty_like(taken).scatter_(1, order, taken).view_as(index)


class Capacity:
    """That of all blocks of a rank.

    Args:
        most: choices of a sample that an expert takes; None: all.
        samples: of a microbatch.

    Attributes:
        total: (2,), choices that were dropped and choices in all, of a step, as far as its backwards have run; both 0
            where there is no capacity.
    """

    def __init__(self, most: int | None, samples: int, device: torch.device) -> None:
        self.most, self.samples = most, samples
        self.total = torch.zeros(2, dtype=torch.float64, device=device)

    def begin(self) -> None:
        """A step begins."""
        self.total = torch.zeros_like(self.total)


@dataclass(frozen=True, slots=True)
class Intake:
    """The tokens of a rank that the experts of a block take.

    Attributes:
        sequence: tokens of a sample, wherever they are; ``positions``: of this rank's in it.
        sharers: the ranks that have other tokens of the same samples.
        counts: whether drops are this rank's to report: others may find the same.
    """

    capacity: Capacity
    sequence: int
    positions: Tensor
    sharers: Sequence[Axis]
    counts: bool

    @property
    def rows(self) -> int | None:
        """The most that an expert gets of a microbatch; None: as many as come."""
        return None if self.capacity.most is None else self.capacity.most * self.capacity.samples

    def apply(self, index: Tensor, weights: Tensor, none: int) -> tuple[Tensor, Tensor]:
        """index, weights: (tokens, choices), this rank's tokens sample by sample. Of choices that are dropped the index becomes
        ``none``; weights stay as they are."""
        if self.capacity.most is None:
            return index, weights
        own = index.unflatten(0, (self.capacity.samples, -1))
        everyone = torch.zeros(own.shape[0], self.sequence, own.shape[2], dtype=torch.int32, device=index.device)
        everyone[:, self.positions] = own.int()
        for axis in self.sharers:
            all_reduce(everyone, axis).wait()
        taken = kept(everyone, self.capacity.most)[:, self.positions].flatten(0, 1)
        if self.counts:
            drops = torch.stack(((~taken).sum(), torch.full((), taken.numel(), device=index.device))).double()
            weights = cast(Tensor, _Count.apply(weights, drops, self.capacity))
        return index.masked_fill(~taken, none), weights


class _Count(torch.autograd.Function):
    """Identity of the weights. What was dropped counts when their gradient comes: once, however often a block is computed."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, drops: Tensor, capacity: Capacity) -> Tensor:
        ctx.capacity = capacity
        ctx.save_for_backward(drops)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        drops, = ctx.saved_tensors
        ctx.capacity.total = ctx.capacity.total + drops
        return gradient, None, None
