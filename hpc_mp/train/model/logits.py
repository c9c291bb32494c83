"""A user's objective on the logits of a causal model, whose head may be cut along the vocabulary."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hpc_mp.train.parallel.collectives import all_reduce
from hpc_mp.train.parallel.projection import Projection, TensorAxis
from hpc_mp.train.parallel.soft_cap import capped
from hpc_mp.train.pipeline.stage import Batch

LossFunction = Callable[[Any, Batch], tuple[Tensor, Tensor]]  # (outputs, batch) -> (sum, count)


class LogitsObjective(nn.Module):
    """A function of the logits of all tokens and words; every tensor rank computes it.

    Args:
        head: a column projection.
        cap: soft cap of logits; None: none.
        function: called with an object whose ``logits`` are (samples, tokens, words), in fp32 at least, and with the batch.
    """

    def __init__(self, head: Projection, vocabulary: int, cap: float | None, function: LossFunction) -> None:
        super().__init__()
        self.head, self.vocabulary, self.cap, self.function = head, vocabulary, cap, function

    def forward(self, hidden: Tensor, batch: Batch, own: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """hidden: (samples, tokens, hidden)."""
        logits = self.head(self.head.tensor.enter(hidden))
        if self.head.tensor.size > 1:
            logits = _AllWords.apply(logits, self.vocabulary, self.head.tensor)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self.function(SimpleNamespace(logits=capped(logits, self.cap)), batch)


class _AllWords(torch.autograd.Function):
    """The logits of all words, from those of each rank's words. All ranks get the same gradient, of which each keeps its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, vocabulary: int, tensor: TensorAxis) -> Tensor:
        ctx.begin, ctx.length = tensor.part(vocabulary)
        whole = part.new_zeros(*part.shape[:-1], vocabulary)
        whole[..., ctx.begin:ctx.begin + ctx.length] = part
        all_reduce(whole, tensor.axis).wait()
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[..., ctx.begin:ctx.begin + ctx.length].contiguous(), None, None
