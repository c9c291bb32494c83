"""The expert axis: ranks that share out the experts of a block send each other the tokens that these are for.

A rank's rows, one for each choice of its tokens, lie expert by expert, and so rank by rank. How many there are for each expert
goes ahead; then the rows travel in an all-to-all whose pieces are as long as routing has made them, and what the experts make of
them travels back the same way. Either way's backward is the other way. At their experts' rank rows come rank by rank and are put
in the order of its experts, so that an expert computes with the rows of all ranks at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hpc_mp.layout.models import ExpertCut
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.parallel.groups import Axis


@dataclass(frozen=True, slots=True)
class Journey:
    """The way of one passage's rows to their experts and back.

    Attributes:
        sent, come: rows for each rank and from each rank.
        order: of the rows that come, in the order of experts, the place where each came.
        inverse: the place in the order of experts of each row that came.
        counts: rows of each expert of this rank.
    """

    axis: Axis
    sent: tuple[int, ...]
    come: tuple[int, ...]
    order: Tensor
    inverse: Tensor
    counts: tuple[int, ...]

    def out(self, rows: Tensor) -> Tensor:
        """(rows of this rank's tokens, width) -> (rows for this rank's experts, width)."""
        return cast(Tensor, _Out.apply(rows, self))

    def back(self, rows: Tensor) -> Tensor:
        """(rows of this rank's experts, width) -> (rows for this rank's tokens, width)."""
        return cast(Tensor, _Back.apply(rows, self))

    def to_experts(self, rows: Tensor) -> Tensor:
        return _exchanged(rows, self.sent, self.come, self.axis)[self.order]

    def to_tokens(self, rows: Tensor) -> Tensor:
        return _exchanged(rows[self.inverse], self.come, self.sent, self.axis)


class _Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.to_experts(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.journey.to_tokens(gradient), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.to_tokens(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.journey.to_experts(gradient), None


class ExpertAxis:
    """The expert axis as one rank sees it.

    Args:
        experts: of each block.
    """

    def __init__(self, axis: Axis, experts: int) -> None:
        self.axis, self.size = axis, axis.size
        parts = [ExpertCut(axis.size, rank).part(experts) for rank in range(axis.size)]
        self.parts = [part.stop - part.start for part in parts]
        self.own = parts[axis.rank]

    def journey(self, counts: Sequence[int], device: torch.device) -> Journey:
        """counts: this rank's rows for each expert of the block. The host waits for the device here, and for the other ranks."""
        mine = self.own.stop - self.own.start
        given = torch.tensor(counts, device=device)
        received = _exchanged(given, self.parts, [mine] * self.size, self.axis)
        # Tensors of a dry run have no values: other ranks send there what this one sends.
        found = [*counts[self.own]] * self.size if isinstance(received, FakeTensor) else received.tolist()
        from_each = [found[rank * mine:(rank + 1) * mine] for rank in range(self.size)]
        expert = torch.arange(mine).repeat(self.size).repeat_interleave(torch.tensor(found), output_size=sum(found))
        order = expert.argsort(stable=True)
        ends = [*accumulate(self.parts, initial=0)]
        return Journey(self.axis, tuple(sum(counts[begin:end]) for begin, end in pairwise(ends)), tuple(map(sum, from_each)),
                       order.to(device), order.argsort().to(device), tuple(map(sum, zip(*from_each, strict=True))))


def _exchanged(rows: Tensor, sent: Sequence[int], come: Sequence[int], axis: Axis) -> Tensor:
    """Exchange rows over an axis. ``sent``, ``come``: number of rows for and from each rank, in the order of ranks."""
    arrived = rows.new_empty(sum(come), *rows.shape[1:])
    with profiled(f"all-to-all, {axis.name}"):
        dist.all_to_all_single(arrived, rows.contiguous(), list(come), list(sent), group=axis.group)
    return arrived
