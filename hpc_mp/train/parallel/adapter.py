"""Adapters beside projections: B (A x) × scale, made of two projections.

Nothing is sent for them in a pass. A whole A gets the input that has passed ``enter``, and the share of its gradient that this
rank's part of B brings; a whole B gets this rank's share of A x, which the projection sums together with its own product.
"""

from typing import cast

import torch
from torch import Tensor, nn

from hpc_mp.train.parallel.dropout import DropoutClock, HashDropout


class Adapter(nn.Module):
    """The adapter of a projection, or those of a parameter of experts: then A and B have a matrix for each expert. ``dropout``:
    of the input. ``down``, ``up``: the projections A and B."""

    def __init__(self, scale: float, dropout: nn.Module, down: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.scale, self.dropout, self.down, self.up = scale, dropout, down, up

    def forward(self, x: Tensor, *ends: Tensor) -> Tensor:
        """Return what is added to the product. ``ends``: of the experts' rows."""
        return cast(Tensor, self.up(self.down(self.dropout(x), *ends) * self.scale, *ends))


class InputDropout(HashDropout):
    """Dropout of an adapter's input. ``tokens``: positions of this context rank's tokens in the whole sample; ``own``: those of
    them that this tensor rank has between cut layers. ``first``: number of the first of this rank's inputs; ``inputs``: number of
    all inputs of the projection."""

    def __init__(self, p: float, site: str, clock: DropoutClock, tokens: Tensor, own: Tensor, first: int, inputs: int) -> None:
        super().__init__(p, site, clock, tokens)
        self.own, self.first, self.inputs = own, first, inputs

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of x, (samples, tokens, this rank's inputs)."""
        if self.p == 0.0 or not self.training:
            return x
        rows = self.rows if x.shape[1] == len(self.rows) else self.own
        within = torch.arange(self.first, self.first + x.shape[2], device=x.device)
        return self.dropped(x, (rows.unsqueeze(1) * self.inputs + within).to(torch.int32))
