"""Initial values of parameters, written into this rank's part of every unit."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hpc_mp.layout.flat import Box, pieces
from hpc_mp.layout.models import Weight
from hpc_mp.train.parallel.data_axis import Unit

CHUNK = 1 << 21  # elements of a piece: 8 MB of fp32, and as much while its parts are joined, however large parameters are

Source = Callable[[Weight, Box], Tensor]  # returns the values of a part of a weight, which may hold only until the next call


@torch.no_grad()
def fill(units: Iterable[Unit], source: Source) -> None:
    """Fill this rank's part of every unit with values from a source."""
    for unit in units:
        for piece in unit.layout.pieces(unit.shard.rank):
            target = unit.master[piece.begin:piece.begin + piece.size].view(piece.shape)
            fill_part(target, piece.slot.weight, piece.box, source)


def fill_part(target: Tensor, weight: Weight, box: Box, source: Source) -> None:
    """Fill ``target``, the part of a weight in ``box``, in pieces of ``CHUNK`` elements."""
    for some in pieces(tuple(target.shape), CHUNK):
        inner = tuple(slice(whole.start + part.start, whole.start + part.stop) for whole, part in zip(box, some, strict=True))
        target[some].copy_(source(weight, inner))
