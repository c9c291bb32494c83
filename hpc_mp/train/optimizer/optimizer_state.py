"""Where optimizer state lies between two steps: on the device, in the host's memory, or in a file on a disk.

A home gives the optimizer turns. A turn is what is updated at once, with views of the state as it will be there by then. On the
device there is one turn with everything. Elsewhere a turn has at most ``chunk_elements``, and the state streams through two
buffers: while one chunk is updated, the one before is written back and the next one is fetched. A chunk of a stretch begins at a
multiple of so many from where the stretch begins, so that vector instructions meet the same elements as without: the update is
equal to the last bit. Masters in host memory stream too, in a row of the buffers beside those of the state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from hpc_mp.layout.offload import BUFFERS, chunk_elements
from hpc_mp.train.parallel.host_parameters import HostParts

MASTER = "master"  # what a turn calls the parameters themselves, where they stream beside their state
Arrays = Mapping[str, Mapping[str, Tensor]]  # unit -> slot -> this rank's part of it


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements ``begin`` to ``end`` of a rank's part of a unit; ``spared`` from weight decay."""

    unit: str
    begin: int
    end: int
    spared: bool


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shape of optimizer state: ``slots`` numbers of ``dtype`` for each element of ``lengths``, a rank's parts of its units."""

    lengths: Mapping[str, int]
    slots: tuple[str, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(self.lengths.values()) * len(self.slots) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateBytesAt:
    """Bytes of optimizer state by where they lie, buffers among those on the device."""

    device: int = 0
    host: int = 0
    disk: int = 0


Turn = Sequence[tuple[Stretch, Mapping[str, Tensor]]]  # what is updated at once, each with its slots


class StateHome(Protocol):
    """Optimizer state of a rank."""

    @property
    def turns(self) -> Sequence[Turn]:
        """In the order in which ``each`` calls for them."""

    @property
    def nbytes(self) -> StateBytesAt: ...

    def each(self, update: Callable[[int], None]) -> None:
        """Call ``update`` with the number of every turn, whose state is there meanwhile."""

    def arrays(self) -> Arrays:
        """All state, to be read or filled between two steps."""

    def release(self, values: Tensor) -> None:
        """This part of one of ``arrays`` has been read or filled: it need not stay in memory."""


class OnDevice:
    """All state where parameters are: on the device, both of them."""

    def __init__(self, shape: StateShape, stretches: Iterable[Stretch], device: torch.device, *,
                 masters: HostParts = MappingProxyType({})) -> None:
        if masters:
            raise ValueError("masters in host memory need a home from which they stream")
        self._arrays = {unit: {slot: torch.zeros(length, dtype=shape.dtype, device=device) for slot in shape.slots}
                        for unit, length in shape.lengths.items()}
        self.nbytes = StateBytesAt(device=shape.nbytes)
        self.turns = [[(each, {slot: whole[each.begin:each.end] for slot, whole in self._arrays[each.unit].items()})
                       for each in stretches]]

    def each(self, update: Callable[[int], None]) -> None:
        update(0)

    def arrays(self) -> Arrays:
        return self._arrays

    def release(self, values: Tensor) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``begin`` to ``end`` of a rank's part of a unit, and what it consists of."""

    unit: str
    begin: int
    end: int
    stretches: tuple[Stretch, ...]


def chunks(stretches: Iterable[Stretch], most: int) -> Iterator[Chunk]:
    """Stretches, cut at multiples of ``most`` from their beginnings; neighbours in a unit that fit are together."""
    held: list[Stretch] = []
    for stretch in stretches:
        for begin in range(stretch.begin, stretch.end, most):
            cut = replace(stretch, begin=begin, end=min(begin + most, stretch.end))
            if held and (held[0].unit != cut.unit or cut.end - held[0].begin > most):
                yield _chunk(held)
                held = []
            held.append(cut)
    if held:
        yield _chunk(held)


def _chunk(stretches: Sequence[Stretch]) -> Chunk:
    return Chunk(stretches[0].unit, stretches[0].begin, stretches[-1].end, tuple(stretches))


class Store(Protocol):
    """Memory or a disk, from which chunks come and to which they go back."""

    @property
    def nbytes(self) -> StateBytesAt: ...

    def fetch(self, number: int, into: Tensor) -> None:
        """Fill the beginning of a buffer, (slots, elements), with a chunk."""

    def keep(self, number: int, source: Tensor) -> None:
        """Put it back."""

    def arrays(self) -> Arrays: ...

    def release(self, values: Tensor) -> None: ...


class Streamed:
    """State elsewhere. Each buffer has its own stream on a GPU, which fetches, updates and puts back in this order; the two run
    beside each other.

    Args:
        open_store: makes the store of these chunks, which go through these buffers, (slots, elements).
        masters: of all units, or of none.
    """

    def __init__(self, shape: StateShape, stretches: Iterable[Stretch], device: torch.device,
                 open_store: Callable[[StateShape, Sequence[Chunk], Sequence[Tensor]], Store], *,
                 masters: HostParts = MappingProxyType({})) -> None:
        self._masters = masters
        rows = (*shape.slots, MASTER) if masters else shape.slots
        elements = chunk_elements(shape.lengths.values())
        self._chunks = list(chunks(stretches, elements))
        self._buffers = [torch.zeros(len(rows), elements, dtype=shape.dtype, device=device) for _ in range(BUFFERS)]
        self._of_state = [buffer[:len(shape.slots)] for buffer in self._buffers]
        self._store = open_store(shape, self._chunks, self._of_state)
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in self._buffers] if device.type == "cuda" else []
        self.turns = [[(each, {slot: row[each.begin - chunk.begin:each.end - chunk.begin]
                               for slot, row in zip(rows, self._buffers[number % BUFFERS], strict=True)})
                       for each in chunk.stretches] for number, chunk in enumerate(self._chunks)]

    @property
    def nbytes(self) -> StateBytesAt:
        store = self._store.nbytes
        return replace(store, device=store.device + sum(buffer.nbytes for buffer in self._buffers))

    def each(self, update: Callable[[int], None]) -> None:
        for part in self._masters.values():
            part.bus.settle()
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        for number, chunk in enumerate(self._chunks):
            buffer, master = self._of_state[number % BUFFERS], self._masters.get(chunk.unit)
            with self._beside(number % BUFFERS):
                self._store.fetch(number, buffer)
                if master is not None:
                    master.fetch(chunk.begin, chunk.end, self._buffers[number % BUFFERS][-1])
                update(number)
                self._store.keep(number, buffer)
                if master is not None:
                    master.keep(chunk.begin, chunk.end, self._buffers[number % BUFFERS][-1])
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def arrays(self) -> Arrays:
        for stream in self._streams:
            stream.synchronize()
        for part in self._masters.values():
            part.bus.synchronize()  # the host may now fill them
        return self._store.arrays()

    def release(self, values: Tensor) -> None:
        self._store.release(values)

    def _beside(self, number: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[number]) if self._streams else nullcontext()
