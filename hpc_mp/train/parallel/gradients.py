"""Gradients add up in one flat array for each unit, in the masters' format, and are summed over the data axis from there.

Nothing lies in ``parameter.grad``: whoever makes a gradient adds it to its slot's ``Sink``, matrix products of projections at
once and all others through a hook. A unit counts what has come: when a backward has brought something for every slot, its
gradient is complete, and the sum over the data axis begins while the blocks below are still computed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from hpc_mp.layout.flat import FlatLayout, ParameterSlot
from hpc_mp.train.parallel.collectives import Running, all_reduce, reduce_scatter
from hpc_mp.train.parallel.groups import Axis, Groups

MOST_RUNNING = 2  # units whose gradients are on their way at once, where each needs an array of its own


@dataclass(slots=True)
class Slabs:
    """Arrays for the gradients of one unit at a time, where ranks keep only the sum of their own part: taken while a unit's
    backward runs, and free again when its sum has arrived."""

    dtype: torch.dtype
    device: torch.device
    running: list[tuple[Running, Tensor]] = field(default_factory=list)
    free: list[Tensor] = field(default_factory=list)

    def take(self, length: int) -> Tensor:
        """Zeros, (length,)."""
        for slab in self.free:
            if slab.numel() == length:
                self.free = [other for other in self.free if other is not slab]
                return slab.zero_()
        return torch.zeros(length, dtype=self.dtype, device=self.device)

    def send(self, running: Running, slab: Tensor) -> None:
        """``slab`` is free once the sum made of it has arrived."""
        self.running.append((running, slab))
        while len(self.running) > MOST_RUNNING:
            self._settle()

    def settle(self) -> None:
        while self.running:
            self._settle()
        self.free = []

    def _settle(self) -> None:
        running, slab = self.running.pop(0)
        running.wait()
        self.free.append(slab)


class UnitGradient:
    """The gradient of one unit.

    Args:
        kept: whether ranks keep all of it until it is summed once per step, or their own part of its sum.
    """

    def __init__(self, layout: FlatLayout, groups: Groups, kept: bool, slabs: Slabs) -> None:
        holders = groups.holders(layout.of_experts)
        self.layout, self.slabs = layout, slabs
        self.shard, self.replicate = holders.shard, holders.replicate
        length = layout.padded if kept else layout.part
        self.held = torch.zeros(length, dtype=slabs.dtype, device=slabs.device)
        begin = self.shard.rank * layout.part if kept else 0
        self.part = self.held[begin:begin + layout.part]  # where the sum of this rank's part ends up
        self.kept = kept
        self.shared = list(_stretches(layout, groups.sharing))
        self.whole: Tensor | None = self.held if kept else None
        self._views: dict[str, Tensor] = {}  # of ``whole``, by weight: each of them is asked for in every backward
        self.begun = False  # whether a sum has begun before its REDUCE
        self._announced, self._come = False, 0
        self._running = Running()

    def begin(self) -> None:
        """A step begins."""
        self.held.zero_()

    def announce(self) -> None:
        """The backward that now runs is followed by a sum: it may begin as soon as the gradient is complete."""
        self._announced, self._come = True, 0

    def view(self, slot: ParameterSlot) -> Tensor:
        """Where the gradient of a slot adds up, in the slot's shape."""
        if self.whole is None:
            self.whole = self.slabs.take(self.layout.padded)
        found = self._views.get(slot.weight.name)
        if found is None:
            found = self._views[slot.weight.name] = self.whole[slot.begin:slot.begin + slot.size].view(slot.shape)
        return found

    def came(self) -> None:
        """A slot's gradient of this backward has been added."""
        self._come += 1
        if self._announced and self._come == len(self.layout.slots):
            self.begun = True
            self.reduce()

    def reduce(self) -> None:
        """Begin to sum what has come over the shards; replicas follow at the end of the step."""
        self._announced = False
        whole = self.whole
        if whole is None:
            return
        for begin, end, axis in self.shared:
            all_reduce(whole[begin:end], axis).wait()
        if self.kept:
            self._running.wait()
            self._running = reduce_scatter(self.part, whole, self.shard)
            if self.shard.size == 1:
                self._running = all_reduce(self.part, self.replicate)
        else:
            self.whole, self._views = None, {}
            self.slabs.send(reduce_scatter(self.part, whole, self.shard), whole)

    def reduce_replicas(self) -> None:
        """Sum the parts of ranks that hold the same one; the shards' sums have arrived."""
        self._running.wait()
        if self.shard.size > 1:
            self._running = all_reduce(self.part, self.replicate)

    def settle(self) -> None:
        self._running.wait()


def _stretches(layout: FlatLayout, shares: Callable[[ParameterSlot], Axis]) -> Iterator[tuple[int, int, Axis]]:
    """(begin, end, axis) of what is summed over the same ranks and lies side by side in a unit."""
    for axis, slots in groupby(layout.slots, shares):
        if axis.size > 1:
            first, *_ = several = list(slots)
            yield first.begin, several[-1].begin + several[-1].size, axis


@dataclass(frozen=True, slots=True)
class Sink:
    """Where the gradient of one parameter goes."""

    unit: UnitGradient
    slot: ParameterSlot

    def add(self, gradient: Tensor, more: bool = False) -> None:
        """``more``: as for ``add_product``."""
        self.unit.view(self.slot).add_(gradient)
        if not more:
            self.unit.came()

    def add_product(self, left: Tensor, right: Tensor, more: bool = False) -> None:
        """Add ``left @ right``; both are matrices, and their product has as many elements as the slot. ``more``: it is a part of
        this backward's gradient, and others follow."""
        _add_product(self.unit.view(self.slot), left, right)
        if not more:
            self.unit.came()

    def add_products(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add to each row of the slot's first dimension the product of a pair of matrices."""
        target = self.unit.view(self.slot)
        for row, (left, right) in enumerate(pairs):
            _add_product(target[row], left, right)
        self.unit.came()

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Add each of ``rows``, (n, width), to the row that ``index``, (n,), names: on a GPU sorted by row, because its
        ``index_add_`` adds in an order that changes from run to run."""
        target = self.unit.view(self.slot)
        rows = rows.to(target.dtype)
        if rows.is_cuda:
            target.index_put_((index,), rows, accumulate=True)
        else:
            target.index_add_(0, index, rows)
        self.unit.came()


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """A GPU adds a product of half precision in the masters' format: it is rounded once, and read and written once."""
    if left.shape[1] == 0:  # an expert without a row
        return
    whole = target.view(left.shape[0], right.shape[1])
    if left.dtype == target.dtype:
        whole.addmm_(left, right)
    elif left.is_cuda:
        torch.ops.aten.addmm.dtype_out(whole, left, right, target.dtype, out=whole)
    else:
        target.add_((left @ right).view(target.shape))
