"""The update of whole weights by torch's own optimizers, Muon and Adafactor.

A weight lies in parts on the ranks of two axes: tensor ranks have rectangles of it, and shard ranks have stretches of these. Its
owner (``layout/owners.py``) collects gradient and parameter of all of it, in two steps, lets torch update it, and sends the new
parameter back on the same way. So a unit's gradients and parameters travel once to their owners, and its parameters once back,
and each rank updates about as many elements as it has of the masters. The numbers are torch's: nothing is approximated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpc_mp.layout.flat import FlatLayout, ParameterSlot
from hpc_mp.layout.models import Weight
from hpc_mp.layout.owners import OWNED, overlap_of, owners
from hpc_mp.train.parallel.collectives import all_to_all
from hpc_mp.train.parallel.data_axis import TrainedUnit
from hpc_mp.train.parallel.groups import Axis

Maker = Callable[[nn.Parameter, Any, float], torch.optim.Optimizer]  # (parameter, settings, weight decay)


def muon(parameter: nn.Parameter, settings: Any, decay: float) -> torch.optim.Optimizer:
    """Return Muon whose updates are as large as AdamW's, so that one learning rate is right for both (arXiv:2502.16982, 2.2)."""
    return torch.optim.Muon([parameter], lr=0.0, weight_decay=decay, momentum=settings.muon_momentum,
                            adjust_lr_fn="match_rms_adamw")


def adafactor(parameter: nn.Parameter, settings: Any, decay: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([parameter], lr=0.0, weight_decay=decay)


MAKERS: Mapping[str, Maker] = {"muon": muon, "adafactor": adafactor}


@dataclass(frozen=True, slots=True)
class Owned:
    """A weight that this rank owns. Its parameter has values only during an update."""

    unit: str
    slot: ParameterSlot
    shape: tuple[int, ...]  # of the module's parameter
    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer
    state: Mapping[str, Tensor]  # by slot
    factor: float  # of the learning rate

    def update(self, gradient: Tensor, values: Tensor, rate: float) -> None:
        """Update ``values``, in the engine's shape."""
        self.parameter.data, self.parameter.grad = values.view(self.shape), gradient.view(self.shape)
        self.optimizer.param_groups[0]["lr"] = rate * self.factor
        self.optimizer.step()
        self.parameter.grad = None
        self.parameter.data = values.new_empty(0)


class WholeWeights:
    """The weights of a rank's units that are updated as a whole. ``layouts``: the rank's units on each rank of the tensor axis.
    ``shapes``: of the modules' parameters, by name; the factors of adapters have the shapes of their weights. ``treatment``:
    weight -> whether a parameter has no weight decay, and the factor of its learning rate."""

    def __init__(self, units: Mapping[str, TrainedUnit], layouts: Sequence[Mapping[str, FlatLayout]],
                 shapes: Mapping[str, tuple[int, ...]], settings: Any, tensor: Axis,
                 treatment: Callable[[Weight], tuple[bool, float]]) -> None:
        self.units, self.layouts, self.tensor = units, layouts, tensor
        shards = max((unit.shard.size for unit in units.values()), default=1)
        self.owners = owners(settings.optimizer, [unit.layout for unit in units.values()], shards * tensor.size)
        self._treatment, self._settings, self._shapes = treatment, settings, shapes
        self.mine = {slot.weight.name: self._owned(unit, slot) for unit in units.values()
                     for slot in self._owned_by(unit, unit.shard.rank) if self._place(slot) == tensor.rank}

    def _owned(self, unit: TrainedUnit, slot: ParameterSlot) -> Owned:
        spared, factor = self._treatment(slot.weight)
        kind, shape = self._settings.optimizer, self._shapes.get(slot.weight.name, slot.weight.shape)
        parameter = nn.Parameter(unit.master.new_empty(shape))
        optimizer = MAKERS[kind](parameter, self._settings, 0.0 if spared else self._settings.weight_decay)
        parameter.data = unit.master.new_empty(0)
        state = {name: unit.master.new_zeros(size) for name, size in OWNED[kind].shapes(shape).items()}
        optimizer.state[parameter] = state | {"step": torch.zeros((), dtype=torch.float32)}
        return Owned(unit.layout.unit, slot, shape, parameter, optimizer, state, factor)

    def _owned_by(self, unit: TrainedUnit, shard: int) -> list[ParameterSlot]:
        """Return the slots of a unit that are owned by the tensor ranks of a shard rank, in an order that all tensor ranks have:
        that of the unit depends on how many ranks share a slot."""
        slots = (slot for slot in unit.layout.slots if self.owners.get(slot.weight.name, -1) // self.tensor.size == shard)
        return sorted(slots, key=lambda slot: slot.weight.name)

    def _place(self, slot: ParameterSlot) -> int:
        """Return the tensor rank of a slot's owner."""
        return self.owners[slot.weight.name] % self.tensor.size

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for owned in self.mine.values() for values in owned.state.values())

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the masters, given their gradients. All tensor × shard ranks call this."""
        for unit in self.units.values():
            if not self.owners.keys().isdisjoint(slot.weight.name for slot in unit.layout.slots):
                self._update(unit, rate)

    def set_steps(self, number: int) -> None:
        """Set the number of updates of a loaded state."""
        for owned in self.mine.values():
            owned.optimizer.state[owned.parameter]["step"].fill_(number)

    def _update(self, unit: TrainedUnit, rate: float) -> None:
        """Update a unit: collect stretches from shard ranks, have the tensor ranks update them, and send them back."""
        layout, shard, first = unit.layout, unit.shard, unit.shard.rank * unit.layout.part
        flat = torch.stack((unit.gradient.part.to(unit.master.dtype), unit.master))
        owned = [self._owned_by(unit, rank) for rank in range(shard.size)]
        mine = owned[shard.rank]
        # The parts of each rank's slots that this rank has, and the parts of this rank's slots that each rank has.
        own = [[overlap_of(layout, slot, shard.rank) for slot in slots] for slots in owned]
        elsewhere = [[overlap_of(layout, slot, rank) for slot in mine] for rank in range(shard.size)]
        come = _exchange(flat, [[flat[:, part.start - first:part.stop - first] for part in parts] for parts in own], 2,
                         [list(map(len, parts)) for parts in elsewhere], shard)
        updated = self._over_tensor(unit, mine, [torch.cat(pieces, 1) for pieces in zip(*come, strict=True)], rate)
        back = _exchange(flat, [[values[:, part.start - slot.begin:part.stop - slot.begin] for slot, values, part in
                                 zip(mine, updated, parts, strict=True)] for parts in elsewhere], 1,
                         [list(map(len, parts)) for parts in own], shard)
        for parts, row in zip(own, back, strict=True):
            for part, values in zip(parts, row, strict=True):
                unit.master[part.start - first:part.stop - first] = values[0]

    def _over_tensor(self, unit: TrainedUnit, slots: Sequence[ParameterSlot], stretches: Sequence[Tensor],
                     rate: float) -> list[Tensor]:
        """Return this tensor rank's new parameters of slots, (1, elements) each, given gradients and parameters, (2, elements).
        Each rectangle of a weight is sent by the first of the tensor ranks that have it, and goes back to all of them."""
        ranks, mine = range(self.tensor.size), [slot for slot in slots if self._place(slot) == self.tensor.rank]
        slots_of = [{slot.weight.name: slot for slot in layouts[unit.layout.unit].slots} for layouts in self.layouts]
        rectangles = [[slots_of[rank][slot.weight.name] for slot in mine] for rank in ranks]
        first = [[slot for slot in rank if slot.replica == 0] for rank in rectangles]
        sent = [[values for slot, values in zip(slots, stretches, strict=True) if self._place(slot) == rank and slot.replica == 0]
                for rank in ranks]
        come = _exchange(unit.master, sent, 2, [[slot.size for slot in rank] for rank in first], self.tensor)
        whole = {slot.weight.name: unit.master.new_empty(2, *slot.weight.shape) for slot in mine}
        for rank, row in zip(first, come, strict=True):
            for slot, values in zip(rank, row, strict=True):
                whole[slot.weight.name][:, *slot.box] = values.view(2, *slot.shape)
        for name, (gradient, values) in whole.items():
            self.mine[name].update(gradient, values, rate)
        returned = [[whole[slot.weight.name][1:, *slot.box] for slot in rank] for rank in rectangles]
        back = _exchange(unit.master, [[values.reshape(1, -1) for values in row] for row in returned], 1,
                         [[slot.size for slot in slots if self._place(slot) == rank] for rank in ranks], self.tensor)
        arrived = [iter(row) for row in back]
        return [next(arrived[self._place(slot)]) for slot in slots]


def _exchange(like: Tensor, sent: Sequence[Sequence[Tensor]], rows: int, lengths: Sequence[Sequence[int]],
              axis: Axis) -> list[list[Tensor]]:
    """Send tensors, (rows, elements) each, to each rank of an axis, and return those that come from each: of as many rows, and
    of these numbers of elements."""
    if axis.size == 1:
        return [list(tensors) for tensors in sent]
    flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
    arrived = all_to_all(flat, axis, [sum(tensor.numel() for tensor in tensors) for tensors in sent],
                         [rows * sum(row) for row in lengths])
    pieces = iter(arrived.split([rows * length for row in lengths for length in row]))
    return [[next(pieces).view(rows, length) for length in row] for row in lengths]
