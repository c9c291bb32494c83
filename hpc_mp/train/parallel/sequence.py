"""Sequence parallelism: between cut layers each tensor rank has its own tokens of every sample.

Korthikanti et al., arXiv:2205.05198, section 4.2: norms, dropouts and residuals then hold and compute a share of the tokens, and
the all-reduce at either end of a cut layer becomes an all-gather and a reduce-scatter of the same bytes: whatever goes into a cut
layer is gathered along the sequence, whatever comes out is summed and cut along it, and each is the other's backward. What
ranks hold alike sees other tokens on each of them, so that its gradients are shares of a sum.

Tokens are cut as ``torch.chunk`` cuts; messages are as long as if all parts were as long as the first. What was gathered is kept
for the gradients of the weights, (batch, whole sequence, hidden) for each layer's attention and MLP.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_mp.train.parallel.collectives import Running, all_gather, all_reduce, reduce_scatter
from hpc_mp.train.parallel.groups import Axis
from hpc_mp.train.parallel.projection import TensorAxis, WeightGradients


class SequenceAxis(TensorAxis):
    """A tensor axis whose ranks have (batch, their tokens, hidden) between cut layers.

    Args:
        sequence: tokens of a sample.
    """

    def __init__(self, axis: Axis, modules: tuple[str, ...], weights: WeightGradients, sequence: int) -> None:
        super().__init__(axis, modules, weights)
        self.sequence, self.sharers = sequence, (axis,)
        self.longest = -(-sequence // self.size)
        self.first_token, self.tokens = self.part(sequence)

    def share(self, x: Tensor, dim: int) -> Tensor:
        return x.narrow(dim, self.first_token, self.tokens)

    def spread(self, x: Tensor) -> Tensor:
        """All tokens, (batch, sequence, hidden), of those that each rank has."""
        part = F.pad(x, (0, 0, 0, self.longest - self.tokens)).contiguous()
        whole = part.new_empty(self.size, *part.shape)
        all_gather(whole.view(-1), part.view(-1), self.axis).wait()
        return whole.transpose(0, 1).flatten(1, 2)[:, :self.sequence].contiguous()

    def summed(self, x: Tensor) -> tuple[Tensor, Running]:
        """This rank's tokens of the sum of (batch, sequence, hidden) over the ranks."""
        padded = F.pad(x, (0, 0, 0, self.longest * self.size - self.sequence))
        parts = padded.unflatten(1, (self.size, self.longest)).transpose(0, 1).contiguous()
        own = torch.zeros_like(parts[0])
        running = reduce_scatter(own.view(-1), parts.view(-1), self.axis)
        return own[:, :self.tokens], running

    def all_tokens(self, x: Tensor) -> Tensor:
        return self.enter(x)

    def total(self, loss: Tensor) -> Tensor:
        return _Total.apply(loss, self.axis)


class _Total(torch.autograd.Function):
    """The sum over the axis of what each rank has found of a loss; backward each rank differentiates its own."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, axis: Axis) -> Tensor:
        total = loss.clone()
        all_reduce(total, axis).wait()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
