"""The expert axis: ranks that share the experts of a block exchange the tokens that are routed to them.

A rank's rows, one for each choice of its tokens, lie expert by expert, and so rank by rank. Ranks first exchange the number of
rows for each expert. Then the rows travel in an all-to-all with pieces of these lengths, and the experts' outputs return the same
way. The backward of each direction is the other direction. Rows arrive rank by rank and are sorted by expert, so that an expert
computes with the rows of all ranks at once.

Where experts have a capacity that is not far above what they receive, every expert gets the same number of rows from each rank,
and rows of no choice fill them up (GShard, arXiv:2006.16668). All lengths are known then, and no host waits for them.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hpc_mp.layout.models import ExpertCut
from hpc_mp.train.device.readback import read_now
from hpc_mp.train.parallel.collectives import all_to_all
from hpc_mp.train.parallel.custom_backward import with_backward
from hpc_mp.train.parallel.groups import Axis


@dataclass(frozen=True, slots=True)
class Journey:
    """The way of the rows of one pass to their experts and back."""

    axis: Axis
    # sent, come: number of rows for each rank and from each rank
    sent: tuple[int, ...]
    come: tuple[int, ...]
    order: Tensor  # indexes of the received rows, sorted by expert
    inverse: Tensor  # place of each received row in this order
    ends: Tensor  # end of the rows of each expert of this rank, (experts,), int32

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
    """The expert axis as one rank sees it. ``experts``: number of experts of each block."""

    def __init__(self, axis: Axis, experts: int) -> None:
        self.axis, self.size = axis, axis.size
        parts = [ExpertCut(axis.size, rank).part(experts) for rank in range(axis.size)]
        self.parts = [part.stop - part.start for part in parts]
        self.own = parts[axis.rank]

    def journey(self, ends: Tensor, rows: int) -> Journey:
        """Exchange the numbers of rows, and return the way of the rows. The host waits for the device and for the other ranks,
        because it has to tell the all-to-all how many rows each rank gets. ``ends``: end of this rank's rows for each expert of
        the block, (experts,), int32. ``rows``: number of these rows; it may be larger than the last end."""
        mine = self.parts[self.axis.rank]
        none = ends.new_zeros(1)
        received = all_to_all(ends.diff(prepend=none), self.axis, self.parts, [mine] * self.size)
        by_rank = received.view(self.size, mine)
        last = torch.stack([ends[stop - 1] for stop in accumulate(self.parts)])
        numbers = torch.cat((last.diff(prepend=none), by_rank.sum(1)))
        lengths = self._shares(rows) if isinstance(ends, FakeTensor) else read_now(numbers)
        sent, come = lengths[:self.size], lengths[self.size:]
        expert = torch.arange(mine, device=ends.device).repeat(self.size).repeat_interleave(received, output_size=sum(come))
        order = expert.argsort(stable=True)
        return Journey(self.axis, tuple(sent), tuple(come), order, order.argsort(), by_rank.sum(0).cumsum(0).int())

    def journey_of_slots(self, slots: int, device: torch.device) -> Journey:
        """Return the way of rows of which every expert gets ``slots`` from each rank. The host waits for nothing."""
        mine = self.parts[self.axis.rank]
        order = torch.arange(self.size * mine * slots, device=device).view(self.size, mine, slots).transpose(0, 1).flatten()
        ends = torch.arange(1, mine + 1, dtype=torch.int32, device=device) * (self.size * slots)
        sent = tuple(slots * part for part in self.parts)
        return Journey(self.axis, sent, (mine * slots,) * self.size, order, order.argsort(), ends)

    def _shares(self, rows: int) -> list[int]:
        """Return the rows for each rank and from each rank in a dry run: experts get equal shares, and all ranks have as many."""
        experts = sum(self.parts)
        shares = [rows // experts + (expert < rows % experts) for expert in range(experts)]
        stops = [*accumulate(self.parts, initial=0)]
        return [*(sum(shares[begin:end]) for begin, end in pairwise(stops)), *[sum(shares[self.own])] * self.size]
