"""Gradients accumulate in one flat array for each unit, in the masters' format, and are reduced over the data axis from there.

``parameter.grad`` is not used: each gradient is added to the ``Sink`` of its slot, matrix products of projections directly, all
others through a hook. A unit counts these additions. When a backward has added a gradient for every slot, the unit's gradient is
complete, and its reduction over the data axis begins while the backward of the blocks before still runs.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from hpc_mp.layout.flat import FlatLayout, ParameterSlot
from hpc_mp.train.parallel.collectives import Running, all_reduce, reduce_scatter
from hpc_mp.train.parallel.groups import Axis, Groups

MOST_RUNNING = 2  # units whose gradients are in flight at once, if each needs an array of its own


@dataclass(slots=True)
class Slabs:
    """Gradient buckets of single units, if ranks keep only the sum of their own part.

    A bucket is taken for the backward of a unit, and is free again after the reduce-scatter of the gradient.
    """

    dtype: torch.dtype
    device: torch.device
    running: list[tuple[Running, Tensor]] = field(default_factory=list)
    free: list[Tensor] = field(default_factory=list)

    def take(self, length: int) -> Tensor:
        """Return zeros, (length,), in a free bucket or a new one."""
        for slab in self.free:
            if slab.numel() == length:
                self.free = [other for other in self.free if other is not slab]
                return slab.zero_()
        return torch.zeros(length, dtype=self.dtype, device=self.device)

    def send(self, running: Running, slab: Tensor) -> None:
        """Free ``slab`` when the reduction that reads it is complete."""
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
        complete: True if ranks keep the whole gradient for one reduction per step, False if they keep their part of the sum.
    """

    def __init__(self, layout: FlatLayout, groups: Groups, complete: bool, slabs: Slabs) -> None:
        holders = groups.holders(layout.of_experts)
        self.layout, self.slabs = layout, slabs
        self.shard, self.replicate = holders.shard, holders.replicate
        length = layout.padded if complete else layout.part
        self.held = torch.zeros(length, dtype=slabs.dtype, device=slabs.device)
        begin = self.shard.rank * layout.part if complete else 0
        self.part = self.held[begin:begin + layout.part]  # receives the sum of this rank's part
        self.kept = complete
        self.shared = list(_stretches(layout, groups.sharing))
        self.whole: Tensor | None = self.held if complete else None
        self._views: dict[str, Tensor] = {}  # weight -> view of ``whole``; every backward uses all of them
        self.begun = False  # True if a reduction has begun before its REDUCE
        self._announced, self._come = False, 0
        self._running = Running()

    def begin(self) -> None:
        """Set the gradient to zero at the beginning of a step."""
        self.held.zero_()

    def announce(self) -> None:
        """Announce a reduction behind the backward that begins: it may start as soon as the gradient is complete."""
        self._announced, self._come = True, 0

    def view(self, slot: ParameterSlot) -> Tensor:
        """Return the view in which the gradient of a slot accumulates, in the slot's shape."""
        if self.whole is None:
            self.whole = self.slabs.take(self.layout.padded)
        view = self._views.get(slot.weight.name)
        if view is None:
            view = self._views[slot.weight.name] = self.whole[slot.begin:slot.begin + slot.size].view(slot.shape)
        return view

    def came(self) -> None:
        """Count a slot whose gradient of this backward has been added."""
        self._come += 1
        if self._announced and self._come == len(self.layout.slots):
            self.begun = True
            self.reduce()

    def reduce(self) -> None:
        """Begin the reduction over the shards; that over replicas follows at the end of the step."""
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
        """Begin the reduction over the ranks that hold the same part, after that over the shards."""
        self._running.wait()
        if self.shard.size > 1:
            self._running = all_reduce(self.part, self.replicate)

    def settle(self) -> None:
        self._running.wait()


def _stretches(layout: FlatLayout, shares: Callable[[ParameterSlot], Axis]) -> Iterator[tuple[int, int, Axis]]:
    """Yield (begin, end, axis) of adjacent slots of a unit that are summed over the same ranks."""
    for axis, slots in groupby(layout.slots, shares):
        if axis.size > 1:
            first, *_ = several = list(slots)
            yield first.begin, several[-1].begin + several[-1].size, axis


@dataclass(frozen=True, slots=True)
class Sink:
    """The destination of the gradient of one parameter."""

    unit: UnitGradient
    slot: ParameterSlot

    def add(self, gradient: Tensor, more: bool = False) -> None:
        """Add a gradient in the slot's shape. ``more``: as for ``add_product``."""
        self.unit.view(self.slot).add_(gradient)
        if not more:
            self.unit.came()

    def add_product(self, left: Tensor, right: Tensor, more: bool = False) -> None:
        """Add the product of two matrices, which has as many elements as the slot.

        ``more``: True if other parts of this backward's gradient follow.
        """
        _add_product(self.unit.view(self.slot), left, right)
        if not more:
            self.unit.came()

    def add_products(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add the product of one pair of matrices to each row of the slot's first dimension."""
        target = self.unit.view(self.slot)
        for row, (left, right) in enumerate(pairs):
            _add_product(target[row], left, right)
        self.unit.came()

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Add ``rows``, (n, width), to the rows of the slot that ``index``, (n,), names.

        A GPU sorts them by row, because its ``index_add_`` adds in an order that changes from run to run.
        """
        target = self.unit.view(self.slot)
        rows = rows.to(target.dtype)
        if rows.is_cuda:
            target.index_put_((index,), rows, accumulate=True)
        else:
            target.index_add_(0, index, rows)
        self.unit.came()


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of two matrices. A GPU adds one of half precision in the masters' format, with one rounding and one pass."""
    if left.shape[1] == 0:  # an expert without a row
        return
    whole = target.view(left.shape[0], right.shape[1])
    if left.dtype == target.dtype:
        whole.addmm_(left, right)
    elif left.is_cuda:
        torch.ops.aten.addmm.dtype_out(whole, left, right, target.dtype, out=whole)
    else:
        target.add_((left @ right).view(target.shape))
