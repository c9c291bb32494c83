"""The expert axis: ranks that share the experts of a block exchange the tokens that are routed to them.

A rank's rows, one for each choice of its tokens, lie expert by expert, and so rank by rank. Ranks first exchange the number of
rows for each expert. Then the rows travel in an all-to-all with pieces of these lengths, and the experts' outputs return the same
way. The backward of each direction is the other direction. Rows arrive rank by rank and are sorted by expert, so that an expert
computes with the rows of all ranks at once.
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
    """The way of the rows of one pass to their experts and back.

    Attributes:
        sent, come: number of rows for each rank and from each rank.
        order: indexes of the received rows, sorted by expert.
        inverse: place of each received row in this order.
        counts: number of rows of each expert of this rank.
    """

    axis: Axis
    sent: tuple[int, ...]
    come: tuple[int, ...]
    order: Tensor
    inverse: Tensor
    counts: tuple[int, ...]

    def out(self, rows: Tensor) -> Tensor:
        """Send (rows of this rank's tokens, width); return (rows for this rank's experts, width)."""
        return cast(Tensor, _Out.apply(rows, self))

    def back(self, rows: Tensor) -> Tensor:
        """Send (rows of this rank's experts, width); return (rows for this rank's tokens, width)."""
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
        experts: number of experts of each block.
    """

    def __init__(self, axis: Axis, experts: int) -> None:
        self.axis, self.size = axis, axis.size
        parts = [ExpertCut(axis.size, rank).part(experts) for rank in range(axis.size)]
        self.parts = [part.stop - part.start for part in parts]
        self.own = parts[axis.rank]

    def journey(self, counts: Sequence[int], device: torch.device) -> Journey:
        """Exchange the numbers of rows, and return the way of the rows. The host waits for the device and for the other ranks.

        Args:
            counts: number of this rank's rows for each expert of the block.
        """
        mine = self.own.stop - self.own.start
        received = _exchanged(torch.tensor(counts, device=device), self.parts, [mine] * self.size, self.axis)
        # Tensors of a dry run have no values: every other rank is assumed to send the same numbers as this one.
        numbers = [*counts[self.own]] * self.size if isinstance(received, FakeTensor) else received.tolist()
        from_each = [numbers[rank * mine:(rank + 1) * mine] for rank in range(self.size)]
        expert = torch.arange(mine).repeat(self.size).repeat_interleave(torch.tensor(numbers), output_size=sum(numbers))
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
