"""Sequence parallelism: between cut layers each tensor rank has its own tokens of every sample.

Korthikanti et al., arXiv:2205.05198, section 4.2: norms, dropouts and residuals hold and compute only a share of the tokens. The
all-reduces at the ends of a cut layer become an all-gather and a reduce-scatter of the same bytes: the input of a cut layer is
gathered along the sequence, its output is summed and scattered along it, and each is the backward of the other. Parameters that
all ranks hold see different tokens on each rank, so that their gradients are shares of a sum.

Tokens are cut as by ``torch.chunk``; in messages all parts are padded to the length of the first. Gathered inputs are kept for
the weight gradients, (batch, whole sequence, hidden) for each layer's attention and MLP.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_mp.train.parallel.collectives import Running, all_gather, reduce_scatter
from hpc_mp.train.parallel.groups import Axis
from hpc_mp.train.parallel.projection import TensorAxis, WeightGradients


class SequenceAxis(TensorAxis):
    """A tensor axis whose ranks have (batch, their tokens, hidden) between cut layers. ``sequence``: number of tokens of a
    sample."""

    def __init__(self, axis: Axis, modules: tuple[str, ...], weights: WeightGradients, sequence: int) -> None:
        super().__init__(axis, modules, weights)
        self.sequence, self.sharers = sequence, (axis,)
        self.longest = -(-sequence // self.size)
        self.first, self.tokens = self.part(sequence)

    def share(self, x: Tensor, dim: int) -> Tensor:
        return x.narrow(dim, self.first, self.tokens)

    def spread(self, x: Tensor) -> Tensor:
        """All-gather the tokens of all ranks, (batch, sequence, hidden)."""
        part = F.pad(x, (0, 0, 0, self.longest - self.tokens)).contiguous()
        whole = part.new_empty(self.size, *part.shape)
        all_gather(whole.view(-1), part.view(-1), self.axis).wait()
        return whole.transpose(0, 1).flatten(1, 2)[:, :self.sequence].contiguous()

    def summed(self, x: Tensor) -> tuple[Tensor, Running]:
        """Reduce-scatter (batch, sequence, hidden): this rank's tokens of the sum over the ranks."""
        padded = F.pad(x, (0, 0, 0, self.longest * self.size - self.sequence))
        parts = padded.unflatten(1, (self.size, self.longest)).transpose(0, 1).contiguous()
        own = torch.zeros_like(parts[0])
        running = reduce_scatter(own.view(-1), parts.view(-1), self.axis)
        return own if self.tokens == self.longest else own[:, :self.tokens], running

    def all_tokens(self, x: Tensor) -> Tensor:
        return self.enter(x)
