"""Owners of whole weights, for optimizers that need whole matrices: Muon orthogonalizes them, and Adafactor keeps statistics of
their rows and columns.

The ranks that hold parts of the same units (tensor × shard ranks) share such weights out: each is owned by one rank, which keeps
its optimizer state and updates it. Owners are chosen so that ranks own about equally many elements. Shapes are those of the
modules, because what is a row depends on them. The engine follows this table. The planner counts it; it does not know shapes of
modules, and its count for Adafactor, whose state is small, may differ a little.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, FlatLayout, ParameterSlot
from hpc_mp.layout.models import Weight
from hpc_mp.layout.optimizers import WHOLE_WEIGHTS

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OwnedState:
    """An optimizer with whole weights."""

    owns: Callable[[str, Weight], bool]  # True for a weight of a unit that is updated as a whole
    shapes: Callable[[Shape], Mapping[str, Shape]]  # the state of a weight of this shape, by slot


def hidden_matrix(unit: str, weight: Weight) -> bool:
    """Return True for a matrix of a block: Muon is for these (arXiv:2502.16982), all else is trained by AdamW."""
    vector = len(weight.shape) < 2 or weight.name.endswith(".bias")
    return unit not in (TIED, EMBEDDING, HEAD) and not vector and not weight.experts


def factored(shape: Shape) -> Mapping[str, Shape]:
    """Return the state of Adafactor: means over rows and columns, or of each element of a vector (arXiv:1804.04235)."""
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


OWNED: Mapping[str, OwnedState] = {
    "muon": OwnedState(hidden_matrix, lambda shape: {"momentum_buffer": shape}),
    "adafactor": OwnedState(lambda unit, weight: True, factored)}


def owners(optimizer: str, units: Iterable[FlatLayout], places: int) -> dict[str, int]:
    """Return the owner of each weight that has one, as a number of a place: shard rank × tensor ranks + tensor rank."""
    sizes = {slot.weight.name: prod(slot.weight.shape) for unit in units for slot in unit.slots
             if optimizer in WHOLE_WEIGHTS and OWNED[optimizer].owns(unit.unit, slot.weight)}
    loads, chosen = [0] * places, {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        chosen[name] = loads.index(min(loads))
        loads[chosen[name]] += size
    return chosen


def most_state(optimizer: str, slots: int, units: list[FlatLayout], tensor: int, rank: int) -> int:
    """Return the most numbers of optimizer state that a shard rank of tensor rank ``rank`` keeps. ``slots``: numbers for each
    element that has no owner. ``units``: of that tensor rank, with equally many shards. ``tensor``: number of tensor ranks."""
    shards = max((unit.shards for unit in units), default=1)
    chosen = owners(optimizer, units, shards * tensor)
    owned = [0] * shards
    for slot in (slot for unit in units for slot in unit.slots if slot.weight.name in chosen):
        shard, place = divmod(chosen[slot.weight.name], tensor)
        if place == rank:
            owned[shard] += sum(map(prod, OWNED[optimizer].shapes(_counted(slot.weight)).values()))
    return max(owned[shard] + slots * sum(unit.part - owned_elements(unit, shard, chosen) for unit in units)
               for shard in range(shards))


def _counted(weight: Weight) -> Shape:
    """Return the shape of a weight with parts side by side, as modules mostly have them."""
    return weight.fused_shape if weight.cut == 2 and not weight.experts else weight.shape


def owned_elements(unit: FlatLayout, shard: int, owned: Mapping[str, int]) -> int:
    """Return the elements of a shard's part that have an owner."""
    return sum(overlap.stop - overlap.start for slot in unit.slots if slot.weight.name in owned
               for overlap in [overlap_of(unit, slot, shard)])


def overlap_of(unit: FlatLayout, slot: ParameterSlot, shard: int) -> range:
    """Return the elements of a slot in a shard's part, counted from the beginning of the unit."""
    begin, end = max(slot.begin, shard * unit.part), min(slot.begin + slot.size, (shard + 1) * unit.part)
    return range(begin, max(begin, end))
