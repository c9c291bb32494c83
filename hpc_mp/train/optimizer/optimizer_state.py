"""Homes of optimizer state between two steps: the device, the host's memory, or a file on a disk.

A home divides the update into turns. A turn is a set of stretches that are updated together, with views of their state. On the
device one turn has all stretches. In another home a turn has at most ``chunk_elements``, and the state streams through two
buffers: during the update of one chunk, the chunk before is written back and the next one is fetched. A chunk begins at a
multiple of ``chunk_elements`` from the beginning of its stretch, so that vector instructions group the same elements as without
chunks: the update is bitwise equal. Masters in host memory stream too, in a separate row of the buffers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hpc_mp.layout.offload import BUFFERS, chunk_elements
from hpc_mp.train.parallel.host_parameters import HostParts

MASTER = "master"  # key of the parameters in a turn, if they stream with their state
Arrays = Mapping[str, Mapping[str, Tensor]]  # unit -> slot -> this rank's part of the state


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements ``begin`` to ``end`` of a rank's part of a unit."""

    unit: str
    begin: int
    end: int
    spared: bool  # True if they have no weight decay
    factor: float = 1.0  # of their learning rate
    shift: int = 0  # elements before them in the part that have no state here


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shape of optimizer state: ``slots`` numbers of ``dtype`` for each element of ``lengths``, a rank's parts of its units."""

    lengths: Mapping[str, int]
    slots: tuple[str, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(self.lengths.values()) * len(self.slots) * self.dtype.itemsize

    def zeros(self, device: torch.device, pinned: bool = False, narrow: Sequence[str] = ()) -> Arrays:
        """Return a state of zeros. ``pinned``: True for pinned memory of the host. ``narrow``: slots in bf16."""
        return {unit: {slot: torch.zeros(length, dtype=torch.bfloat16 if slot in narrow else self.dtype, device=device,
                                         pin_memory=pinned) for slot in self.slots} for unit, length in self.lengths.items()}


@dataclass(frozen=True, slots=True)
class StateBytesAt:
    """Bytes of optimizer state by place; those on the device include buffers."""

    device: int = 0
    host: int = 0
    disk: int = 0


Turn = Sequence[tuple[Stretch, Mapping[str, Tensor]]]  # stretches that are updated together, each with its slots


class StateHolder(Protocol):
    """Holder of a rank's optimizer state."""

    nbytes: StateBytesAt

    def arrays(self) -> Arrays:
        """Return all state, to be read or filled between two steps."""

    def release(self, values: Tensor) -> None:
        """Release a part of one of ``arrays`` from memory after it was read or filled."""
        return  # what is always in memory stays there


class StateHome(StateHolder, Protocol):
    """Home of a rank's optimizer state. ``turns``: in the order in which ``each`` updates them."""

    turns: Sequence[Turn]

    def each(self, update: Callable[[int], None]) -> None:
        """Call ``update`` with the number of each turn while its state is on the device."""


HomeMaker = Callable[[StateShape, Iterable[Stretch], torch.device, HostParts], StateHome]  # the last: masters in host memory


class OnDevice(StateHome):
    """State on the device, which also has the masters."""

    def __init__(self, shape: StateShape, stretches: Iterable[Stretch], device: torch.device, masters: HostParts) -> None:
        if masters:
            raise ValueError("masters in host memory need a home from which they stream")
        self._arrays = shape.zeros(device)
        self.nbytes = StateBytesAt(device=shape.nbytes)
        self.turns = [[(stretch, {slot: whole[stretch.begin - stretch.shift:stretch.end - stretch.shift]
                                  for slot, whole in self._arrays[stretch.unit].items()}) for stretch in stretches]]

    def each(self, update: Callable[[int], None]) -> None:
        update(0)

    def arrays(self) -> Arrays:
        return self._arrays


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``begin`` to ``end`` of a rank's part of a unit, and their stretches."""

    unit: str
    begin: int
    end: int
    stretches: tuple[Stretch, ...]


def chunks(stretches: Iterable[Stretch], limit: int) -> list[Chunk]:
    """Return chunks of at most ``limit`` elements: stretches are cut at multiples of it, and short neighbours joined."""
    runs: list[list[Stretch]] = []
    for stretch in stretches:
        for begin in range(stretch.begin, stretch.end, limit):
            cut = replace(stretch, begin=begin, end=min(begin + limit, stretch.end))
            if runs and runs[-1][0].unit == cut.unit and cut.end - runs[-1][0].begin <= limit:
                runs[-1].append(cut)
            else:
                runs.append([cut])
    return [Chunk(run[0].unit, run[0].begin, run[-1].end, tuple(run)) for run in runs]


class Store(StateHolder, Protocol):
    """Memory or a disk with the chunks of the state."""

    def fetch(self, number: int, into: Tensor) -> None:
        """Fill the beginning of a buffer, (slots, elements), with a chunk."""

    def keep(self, number: int, source: Tensor) -> None:
        """Write a chunk back from a buffer."""


class Streamed(StateHome):
    """State in a store, which streams through buffers. On a GPU each buffer has its own stream, which fetches, updates and writes
    back in this order; the streams run in parallel. ``open_store``: (shape, chunks, buffers of (slots, elements)) -> store.
    ``masters``: unit -> masters in host memory, of all units or of none."""

    def __init__(self, open_store: Callable[[StateShape, Sequence[Chunk], Sequence[Tensor]], Store], shape: StateShape,
                 stretches: Iterable[Stretch], device: torch.device, masters: HostParts) -> None:
        self._device, self._masters = device, masters
        rows = (*shape.slots, MASTER) if masters else shape.slots
        elements = chunk_elements(shape.lengths.values())
        self._chunks = chunks(stretches, elements)
        self._buffers = [torch.zeros(len(rows), elements, dtype=shape.dtype, device=device) for _ in range(BUFFERS)]
        self._of_state = [buffer[:len(shape.slots)] for buffer in self._buffers]
        self._store = open_store(shape, self._chunks, self._of_state)
        stored = self._store.nbytes
        self.nbytes = replace(stored, device=stored.device + sum(buffer.nbytes for buffer in self._buffers))
        self._streams = [torch.cuda.Stream(device) for _ in self._buffers] if device.type == "cuda" else []
        self.turns = [[(stretch, {slot: row[stretch.begin - chunk.begin:stretch.end - chunk.begin]
                                  for slot, row in zip(rows, self._buffers[number % BUFFERS], strict=True)})
                       for stretch in chunk.stretches] for number, chunk in enumerate(self._chunks)]

    def each(self, update: Callable[[int], None]) -> None:
        for part in self._masters.values():
            part.bus.settle()
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        for number, chunk in enumerate(self._chunks):
            place, master = number % BUFFERS, self._masters.get(chunk.unit)
            with torch.cuda.stream(self._streams[place]) if self._streams else nullcontext():
                self._store.fetch(number, self._of_state[place])
                if master is not None:
                    master.fetch(chunk.begin, chunk.end, self._buffers[place][-1])
                update(number)
                self._store.keep(number, self._of_state[place])
                if master is not None:
                    master.keep(chunk.begin, chunk.end, self._buffers[place][-1])
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def arrays(self) -> Arrays:
        for stream in self._streams:
            stream.synchronize()
        for part in self._masters.values():
            part.bus.synchronize()  # after which the host may fill them
        return self._store.arrays()

    def release(self, values: Tensor) -> None:
        self._store.release(values)
