"""The sums and gathers of flat arrays over an axis, on any back end; all of them run beside the computing that follows, but for
``known_to_all``, whose few numbers are waited for.

gloo has no reduce-scatter of its own: torch makes it of an all-reduce, which sends twice the bytes. Here each rank sends every
other one its piece and sums what it gets, in the order of ranks, so that the bytes are those of a ring and the sum is always the
same to the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_mp.train.device.spans import profiled
from hpc_mp.train.parallel.groups import Axis, Tree

# torch 2.13's names, or the earlier ones
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class Running:
    """A collective under way. ``wait`` may be called again; ``finish`` is what remains to be done with what has come."""

    work: dist.Work | None = None
    finish: Callable[[], object] | None = None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.finish is not None:
            self.finish()
        self.work, self.finish = None, None


def all_reduce(values: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Running:
    """Sum ``values`` over the axis, in place."""
    if axis.size == 1:
        return Running()
    with profiled(f"all-reduce, {axis.name}"):
        return Running(dist.all_reduce(values, op, group=axis.group, async_op=True))


def all_gather(whole: Tensor, part: Tensor, axis: Axis) -> Running:
    """Fill ``whole``, (ranks x length,), with the parts of all ranks, (length,). ``part`` may lie in it at its own place."""
    if axis.size == 1:
        if not _begin_together(whole, part):
            whole.copy_(part)
        return Running()
    with profiled(f"all-gather, {axis.name}"):
        return Running(GATHER(whole, part, group=axis.group, async_op=True))


@torch.no_grad()
def reduce_scatter(into: Tensor, whole: Tensor, axis: Axis) -> Running:
    """Add the sum over the ranks of this rank's piece of ``whole``, (ranks x length,), to ``into``, (length,).

    ``whole`` may be overwritten once the result has been waited for, and ``into`` may be its own piece: then it is replaced.
    """
    length = into.numel()
    mine = whole[axis.rank * length:(axis.rank + 1) * length]
    inside = _begin_together(into, mine)
    if axis.size == 1:
        if not inside:
            into.add_(mine)
        return Running()
    if not axis.through_host:
        summed = torch.empty_like(into)
        with profiled(f"reduce-scatter, {axis.name}"):
            work = SCATTER(summed, whole, group=axis.group, async_op=True)
        keep = into.copy_ if inside else into.add_
        return Running(work, lambda: keep(summed))
    arrived = torch.empty_like(whole)
    with profiled(f"reduce-scatter, {axis.name}"):
        work = dist.all_to_all_single(arrived, whole, group=axis.group, async_op=True)

    @torch.no_grad()
    def sum_up() -> None:
        pieces = arrived.view(axis.size, length)
        if inside:
            torch.sum(pieces, 0, out=into)
        else:
            into.add_(pieces.sum(0))

    return Running(work, sum_up)


def known_to_all(values: Tensor, ranks: Tree) -> Tensor:
    """A few numbers of each rank, (n,), as (ranks, n), the same on all.

    gloo sends them up the tree and down again: 2 messages for most ranks. Its all-gather is a ring of ranks - 1 messages per
    rank, each of which waits for the one before.
    """
    if ranks.size > 1 and not ranks.through_host:
        everyone = values.new_empty(ranks.size, *values.shape)
        GATHER(everyone.view(-1), values, group=ranks.block.group)
        return everyone
    blocks = -(-ranks.size // ranks.width)
    everyone = values.new_empty(blocks, ranks.width, *values.shape)
    block = _gathered(values, ranks.block, ranks.width)
    if ranks.block.rank == 0:
        everyone = _gathered(block, ranks.heads, blocks)
    return from_first(everyone, ranks).flatten(0, 1)[:ranks.size]


def from_first(values: Tensor, ranks: Tree) -> Tensor:
    """The numbers of rank 0, which all others have as many of. Over gloo alone; ``values`` is overwritten."""
    for axis in (ranks.heads, ranks.block):
        if axis.size > 1:
            dist.broadcast(values, group=axis.group, group_src=0)
    return values


def _gathered(values: Tensor, axis: Axis, width: int) -> Tensor:
    """On the first rank of an axis what all have, (width, …): zeros behind the last one. The others get nothing of use."""
    rows = values.new_zeros(width, *values.shape)
    if axis.size > 1:
        dist.gather(values, list(rows[:axis.size].unbind()) if axis.rank == 0 else None, group=axis.group, group_dst=0)
    else:
        rows[0] = values
    return rows


def shift(values: Tensor, axis: Axis) -> tuple[Tensor, Running]:
    """Send ``values`` to the next rank of the axis, the last one to the first, and get what the one before has sent. Every rank
    does both at once, in one call: no order of sends and receives can block."""
    sent = values.contiguous()
    came = torch.empty_like(sent)
    to, of = [0] * axis.size, [0] * axis.size
    to[(axis.rank + 1) % axis.size] = of[axis.rank - 1] = sent.numel()
    with profiled(f"shift, {axis.name}"):
        return came, Running(dist.all_to_all_single(came.view(-1), sent.view(-1), of, to, group=axis.group, async_op=True))


def _begin_together(one: Tensor, other: Tensor) -> bool:
    """Whether two arrays begin at the same place of one storage; fake tensors, of a dry run, have no addresses to compare."""
    return one.untyped_storage() is other.untyped_storage() and one.storage_offset() == other.storage_offset()
