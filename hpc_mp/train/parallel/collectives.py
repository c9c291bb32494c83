"""Collectives on flat arrays over an axis, on any back end. All of them run asynchronously, except ``known_to_all`` and
``from_first``, which return when their few numbers have arrived.

gloo has no reduce-scatter of its own: torch emulates it with an all-reduce, which sends twice the bytes. Here each rank sends
every other rank its piece, and sums the pieces that it receives in the order of ranks. The bytes are those of a ring, and the sum
is bitwise reproducible.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_mp.train.device.spans import profiled
from hpc_mp.train.parallel.groups import Axis, Tree

# the names of torch 2.13, or the earlier ones
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class Running:
    """A collective in flight. ``wait`` may be called again; ``finish``: called once, after the arrival of the result."""

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
    """Fill ``whole``, (ranks x length,), with the parts of all ranks, (length,). ``part`` may be its own slice of ``whole``."""
    if axis.size == 1:
        if not _begin_together(whole, part):
            whole.copy_(part)
        return Running()
    with profiled(f"all-gather, {axis.name}"):
        return Running(GATHER(whole, part, group=axis.group, async_op=True))


@torch.no_grad()
def reduce_scatter(into: Tensor, whole: Tensor, axis: Axis) -> Running:
    """Add this rank's piece of the sum of ``whole``, (ranks x length,), over the ranks to ``into``, (length,).

    ``whole`` may be overwritten after ``wait``. ``into`` may be its own slice of ``whole``: then the sum replaces it.
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
    """Gather a few numbers of each rank, (n,), on all ranks, (ranks, n).

    With gloo they go up the tree and down again: 2 messages for most ranks. gloo's own all-gather is a ring of ranks - 1 messages
    per rank, and each message waits for the one before.
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
    """Broadcast the numbers of rank 0 over gloo. ``values`` has the same shape on all ranks, and is overwritten."""
    for axis in (ranks.heads, ranks.block):
        if axis.size > 1:
            dist.broadcast(values, group=axis.group, group_src=0)
    return values


def _gathered(values: Tensor, axis: Axis, width: int) -> Tensor:
    """Gather on the first rank of an axis, (width, …), with zeros behind the last rank; other ranks get no meaningful result."""
    rows = values.new_zeros(width, *values.shape)
    if axis.size > 1:
        dist.gather(values, list(rows[:axis.size].unbind()) if axis.rank == 0 else None, group=axis.group, group_dst=0)
    else:
        rows[0] = values
    return rows


def shift(values: Tensor, axis: Axis) -> tuple[Tensor, Running]:
    """Send ``values`` to the next rank of the axis, the last one to the first, and receive those of the rank before.

    Every rank sends and receives in one call, so that no order of sends and receives can deadlock.
    """
    sent = values.contiguous()
    arrived = torch.empty_like(sent)
    to, of = [0] * axis.size, [0] * axis.size
    to[(axis.rank + 1) % axis.size] = of[axis.rank - 1] = sent.numel()
    with profiled(f"shift, {axis.name}"):
        return arrived, Running(dist.all_to_all_single(arrived.view(-1), sent.view(-1), of, to, group=axis.group, async_op=True))


def _begin_together(one: Tensor, other: Tensor) -> bool:
    """Return whether two arrays begin at the same place of one storage. The fake tensors of a dry run have no addresses."""
    return one.untyped_storage() is other.untyped_storage() and one.storage_offset() == other.storage_offset()
