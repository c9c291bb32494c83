"""Gradients accumulate in one flat array for each unit, in the masters' format, and are reduced over the data axis from there.

``parameter.grad`` is not used: each gradient is added to the ``Sink`` of its slot, matrix products of projections directly, all
others through a hook. The first one overwrites the slot, so that no array has to be set to zero. A unit's gradient is in one of
three states:

============ ========================== ==========================================================================================
state        missing                    next state
============ ========================== ==========================================================================================
accumulating None                       announced, if a backward begins that the unit's reduction follows
announced    slots without a gradient   reducing, if the last one of them gets its gradient; else accumulating, at REDUCE
reducing     0                          accumulating, at REDUCE
============ ========================== ==========================================================================================

So the reduction of a unit begins while the backward of the blocks before still runs. A microbatch of a stage of two blocks with
two slots each, and of a tied weight, which gets several gradients in a backward, so that only REDUCE reduces it::

    action      │ backward                             │ REDUCE │ next action
    block 1     │ +1 +1 ~~~~~ reduction ~~~~~          │        │
    block 0     │             +1 +1 ~~~~~ reduction ~~~│~~~~    │
    tied weight │ +1                +1                 │ ~~~~~ reduction ~~~~~

Units that ranks keep whole are reduced once per step, at the last REDUCE of all stages that have them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from hpc_mp.layout.flat import FlatLayout, ParameterSlot
from hpc_mp.train.parallel.collectives import Running, all_reduce, reduce_scatter
from hpc_mp.train.parallel.grouped import add_grouped_outer
from hpc_mp.train.parallel.groups import Axis, Groups

MOST_RUNNING = 2  # units whose gradients are in flight at once, if each needs an array of its own


@dataclass(slots=True)
class Slabs:
    """Gradient buckets of single units, if ranks keep only the sum of their own part. A bucket is taken for the backward of a
    unit, and is free again after the reduce-scatter of the gradient."""

    dtype: torch.dtype
    device: torch.device
    running: list[tuple[Running, Tensor]] = field(default_factory=list)
    free: list[Tensor] = field(default_factory=list)

    def take(self, length: int) -> Tensor:
        """Return an array (length,), a free bucket or a new one. Its values have no meaning."""
        place = next((place for place, slab in enumerate(self.free) if slab.numel() == length), None)
        return torch.empty(length, dtype=self.dtype, device=self.device) if place is None else self.free.pop(place)

    def send(self, running: Running, slab: Tensor) -> None:
        """Free ``slab`` when the reduction that reads it is complete."""
        self.running.append((running, slab))
        self.settle(MOST_RUNNING)

    def settle(self, limit: int = 0) -> None:
        """Wait until at most ``limit`` reductions are in flight."""
        while len(self.running) > limit:
            running, slab = self.running.pop(0)
            running.wait()
            self.free.append(slab)


class UnitGradient:
    """The gradient of one unit.

    Args:
        complete: True if ranks keep the whole gradient for one reduction per step, False if they keep their part of the sum.
        reductions: number of REDUCE actions in a step of all stages that have the unit.

    Attributes:
        held: array that lives between steps: the whole gradient, or this rank's part. It has no meaning before the
            first step, and takes no memory until then: loading does not wait for zeros.
        part: receives the sum of this rank's part, (part,).
        whole: array in which the gradient accumulates, (padded,); None: a bucket, which is taken when it is needed.
    """

    def __init__(self, layout: FlatLayout, groups: Groups, complete: bool, reductions: int, slabs: Slabs) -> None:
        holders = groups.holders(layout.of_experts)
        self.layout, self.kept, self.reductions, self.slabs = layout, complete, reductions, slabs
        self.shard, self.replicate = holders.shard, holders.replicate
        self.held = torch.empty(layout.padded if complete else layout.part, dtype=slabs.dtype, device=slabs.device)
        begin = self.shard.rank * layout.part if complete else 0
        self.part = self.held[begin:begin + layout.part]
        self.shared = list(_stretches(layout, groups.sharing))
        self.whole: Tensor | None = self.held if complete else None
        self._views: dict[str, Tensor] = {}  # weight -> view of ``whole``; every backward uses all of them
        self._empty: set[str] = set()  # weights whose views have no gradient yet
        self._left = 0  # REDUCE actions of this step
        self._missing: int | None = None
        self._running = Running()

    def begin(self) -> None:
        """Forget the gradient of the last step."""
        if self.kept:
            self._forget()
        else:
            self.held.zero_()
        self._left = self.reductions

    def _forget(self) -> None:
        self._empty = {slot.weight.name for slot in self.layout.slots}

    def announce(self) -> None:
        """Announce that a REDUCE follows the backward that begins: a reduction may start as soon as the gradient is complete."""
        if self.layout.tie is None and (not self.kept or self._left == 1):  # a backward brings a tie several gradients
            self._missing = len(self.layout.slots)

    def claim(self, slot: ParameterSlot) -> tuple[Tensor, bool]:
        """Return the view in which the gradient of a slot accumulates, in the slot's shape, for the gradient that comes now.
        True: it is the first one, and overwrites the view."""
        if self.whole is None:
            self.whole = self.slabs.take(self.layout.padded)
            self._forget()
        name = slot.weight.name
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self.whole[slot.begin:slot.begin + slot.size].view(slot.shape)
        empty = name in self._empty
        self._empty.discard(name)
        return view, empty

    def zeroed(self, slot: ParameterSlot) -> Tensor:
        """Return the view of a slot for an addition: with zeros if the slot has no gradient yet."""
        view, empty = self.claim(slot)
        return view.zero_() if empty else view

    def came(self) -> None:
        """Count a slot whose gradient of this backward has been added."""
        if self._missing:
            self._missing -= 1
            if self._missing == 0:
                self._reduce()

    def reduce(self) -> None:
        """Perform a REDUCE: begin the reduction if it is due, and has not begun during the backward."""
        self._left -= 1
        if self._missing != 0 and (not self.kept or self._left == 0):
            self._reduce()
        self._missing = None

    def _reduce(self) -> None:
        """Begin the reduction over the shards; that over replicas follows at the end of the step."""
        whole = self.whole
        if whole is None:
            return
        for slot in self.layout.slots:
            if slot.weight.name in self._empty:
                self.zeroed(slot)
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

    def collect(self, parameter: Tensor) -> None:
        """Add the gradient that autograd has computed of the parameter, and drop it there."""
        assert parameter.grad is not None
        self.add(parameter.grad)
        parameter.grad = None

    def add(self, gradient: Tensor, more: bool = False) -> None:
        """Add a gradient in the slot's shape. ``more``: as for ``add_product``."""
        view, empty = self.unit.claim(self.slot)
        view.copy_(gradient) if empty else view.add_(gradient)
        if not more:
            self.unit.came()

    def add_product(self, left: Tensor, right: Tensor, more: bool = False) -> None:
        """Add the product of two matrices, which has as many elements as the slot. A GPU computes one of half precision in the
        masters' format, with one rounding and one pass. ``more``: True if other parts of this backward's gradient follow."""
        target, empty = self.unit.claim(self.slot)
        whole = target.view(left.shape[0], right.shape[1])
        if left.dtype == target.dtype:
            torch.mm(left, right, out=whole) if empty else whole.addmm_(left, right)
        elif left.is_cuda and empty:
            torch.ops.aten.mm.dtype_out(left, right, target.dtype, out=whole)
        elif left.is_cuda:
            torch.ops.aten.addmm.dtype_out(whole, left, right, target.dtype, out=whole)
        else:
            product = left @ right
            whole.copy_(product) if empty else whole.add_(product)
        if not more:
            self.unit.came()

    def add_grouped(self, left: Tensor, right: Tensor, ends: Tensor) -> None:
        """Add the products of groups of rows, see ``add_grouped_outer``, to the rows of the slot's first dimension."""
        add_grouped_outer(self.unit.zeroed(self.slot).view(len(ends), left.shape[1], right.shape[1]), left, right, ends)
        self.unit.came()

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Add ``rows``, (n, width), to the rows of the slot that ``index``, (n,), names. A GPU sorts them by row, because its
        ``index_add_`` adds in an order that changes from run to run."""
        target = self.unit.zeroed(self.slot)
        rows = rows.to(target.dtype)
        if rows.is_cuda:
            target.index_put_((index,), rows, accumulate=True)
        else:
            target.index_add_(0, index, rows)
        self.unit.came()
