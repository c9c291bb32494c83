"""The expert axis: ranks that share the experts of a block exchange the tokens that are routed to them.

A rank's rows, one for each choice of its tokens, lie expert by expert, and so rank by rank. Ranks first exchange the number of
rows for each expert. Then the rows travel in an all-to-all with pieces of these lengths, and the experts' outputs return the same
way. The backward of each direction is the other direction. Rows arrive rank by rank and are sorted by expert, so that an expert
computes with the rows of all ranks at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hpc_mp.layout.models import ExpertCut
from hpc_mp.train.parallel.collectives import all_to_all
from hpc_mp.train.parallel.custom_backward import with_backward
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
        return with_backward(self.to_experts, self.to_tokens, rows)

    def back(self, rows: Tensor) -> Tensor:
        """Send (rows of this rank's experts, width); return (rows for this rank's tokens, width)."""
        return with_backward(self.to_tokens, self.to_experts, rows)

    def to_experts(self, rows: Tensor) -> Tensor:
        return all_to_all(rows, self.axis, self.sent, self.come)[self.order]

    def to_tokens(self, rows: Tensor) -> Tensor:
        return all_to_all(rows[self.inverse], self.axis, self.come, self.sent)


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
        mine = self.parts[self.axis.rank]
        received = all_to_all(torch.tensor(counts, device=device), self.axis, self.parts, [mine] * self.size)
        # Tensors of a dry run have no values: every other rank is assumed to send the same numbers as this one.
        numbers = [*counts[self.own]] * self.size if isinstance(received, FakeTensor) else received.tolist()
        expert = torch.arange(mine).repeat(self.size).repeat_interleave(torch.tensor(numbers), output_size=sum(numbers))
        order = expert.argsort(stable=True)
        sent = tuple(sum(counts[begin:end]) for begin, end in pairwise(accumulate(self.parts, initial=0)))
        come = tuple(sum(numbers[rank * mine:(rank + 1) * mine]) for rank in range(self.size))
        by_expert = tuple(sum(numbers[own::mine]) for own in range(mine))
        return Journey(self.axis, sent, come, order.to(device), order.argsort().to(device), by_expert)
