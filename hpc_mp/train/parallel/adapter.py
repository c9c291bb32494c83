"""Adapters beside projections: B (A x) × scale, made of two projections.

Nothing is sent for them in a pass. A whole A gets the input that has passed ``enter``, and the share of its gradient that this
rank's part of B brings; a whole B gets this rank's share of A x, which the projection sums together with its own product.
"""

from typing import cast

import torch
from torch import Tensor, nn

from hpc_mp.train.parallel.dropout import DropoutClock, HashDropout
from hpc_mp.train.parallel.experts import ExpertProjection
from hpc_mp.train.parallel.projection import Projection, TensorAxis


class Adapter(nn.Module):
    """The adapter of a projection.

    Args:
        down, up: names of A and B.
        row: True if the inputs of the projection are cut.
        tensor: axis along which the projection is cut.
    """

    def __init__(self, down: str, up: str, scale: float, dropout: "InputDropout", row: bool, tensor: TensorAxis) -> None:
        super().__init__()
        self.scale, self.dropout = scale, dropout
        self.down, self.up = (Projection(name, None, transposed=False, row=False, tensor=tensor) for name in (down, up))
        self.down.last = self.up.last = row

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.up(self.down(self.dropout(x)) * self.scale))


class ExpertAdapter(nn.Module):
    """The adapters of a parameter of experts, a pair of matrices for each expert.

    Args:
        down, up: names of all A and of all B.
        last: as for the parameter's own projection.
    """

    def __init__(self, down: str, up: str, scale: float, last: bool, tensor: TensorAxis) -> None:
        super().__init__()
        self.scale = scale
        self.down, self.up = (ExpertProjection(name, last, tensor) for name in (down, up))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        return cast(Tensor, self.up(self.down(rows, ends) * self.scale, ends))


class InputDropout(HashDropout):
    """Dropout of an adapter's input.

    Args:
        tokens: positions of this context rank's tokens in the whole sample; ``own``: those of them that this tensor rank has
            between cut layers.
        first: number of the first of this rank's inputs; ``inputs``: number of all inputs of the projection.
    """

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
