"""A user's objective on the logits of a model, whose head may be cut along the vocabulary."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

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
        self.words = TensorAxis(head.tensor.axis, (), head.tensor.weights)  # its ranks have all tokens

    def forward(self, hidden: Tensor, batch: Batch, *_: object) -> tuple[Tensor, Tensor]:
        """Return the sum and the count. ``hidden``: (samples, tokens, hidden)."""
        logits = self.head(self.head.tensor.enter(hidden))
        if self.words.size > 1:
            begin, length = self.words.part(self.vocabulary)
            padded = nn.functional.pad(logits, (begin, self.vocabulary - begin - length))
            logits = self.words.leave(padded)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self.function(SimpleNamespace(logits=capped(logits, self.cap)), batch)
