"""Stores of streamed optimizer state: the host's memory, the device's memory, and a file on a disk of the node."""

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.offload import BUFFERS
from hpc_mp.train.optimizer.optimizer_state import Arrays, Chunk, StateBytesAt, StateShape, Store

AROUND = 2 << 20  # bytes: Linux may map an aligned block of this size of a file when one byte of it is read (a large folio)


class MemoryStore(Store):
    """Arrays that are always in memory. ``place``: "host" for pinned memory of the host; "device" for that of the device, if
    masters stream or slots are narrow. ``narrow``: slots that are kept in bf16; an update gets them in the format of the others,
    and rounds them."""

    def __init__(self, place: Literal["host", "device"], shape: StateShape, chunks: Sequence[Chunk],
                 buffers: Sequence[Tensor], narrow: Sequence[str] = ()) -> None:
        on_host = place == "host"
        self._arrays = shape.zeros(torch.device("cpu") if on_host else buffers[0].device, on_host and buffers[0].is_cuda, narrow)
        self.nbytes = StateBytesAt(**{place: sum(row.nbytes for slots in self._arrays.values() for row in slots.values())})
        self._rows = [[whole[chunk.begin:chunk.end] for whole in self._arrays[chunk.unit].values()] for chunk in chunks]

    def fetch(self, number: int, into: Tensor) -> None:
        for row, target in zip(self._rows[number], into, strict=True):
            target[:len(row)].copy_(row, non_blocking=True)

    def keep(self, number: int, source: Tensor) -> None:
        for row, updated in zip(self._rows[number], source, strict=True):
            row.copy_(updated[:len(row)], non_blocking=True)

    def arrays(self) -> Arrays:
        return self._arrays


class FileStore(Store):
    """An unnamed file of this rank in a directory of its node. No other process can open it, and it vanishes with the rank,
    however that ends. One thread reads and writes in the order of the calls. Raises HpcMpError if the directory does not exist,
    or has not enough room."""

    def __init__(self, directory: Path, shape: StateShape, chunks: Sequence[Chunk], buffers: Sequence[Tensor]) -> None:
        self._chunks, self.nbytes = chunks, StateBytesAt(disk=shape.nbytes)
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  # open as long as the rank lives
            os.posix_fallocate(self._file.fileno(), 0, shape.nbytes)  # zeros, in reserved room
        except OSError as error:
            raise HpcMpError(f"parallel.offload_directory = {directory}",
                             f"cannot hold {shape.nbytes} bytes of optimizer state on {os.uname().nodename} ({error.strerror})",
                             "name a directory that every node has on a disk of its own, with room for all its ranks") from None
        self._mapped = mmap.mmap(self._file.fileno(), 0)  # only pages that are used are read
        rows = iter(torch.frombuffer(self._mapped, dtype=shape.dtype).split(
            [length for length in shape.lengths.values() for _ in shape.slots]))
        self._arrays = {unit: {slot: next(rows) for slot in shape.slots} for unit in shape.lengths}
        self._staged = [torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True) if buffer.is_cuda else buffer
                        for buffer in buffers]  # a disk reads into host memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="optimizer state")
        self._reading: dict[int, Future[None]] = {}
        self._writing: deque[Future[None]] = deque()

    def fetch(self, number: int, into: Tensor) -> None:
        """Fetch a chunk, and begin to read the next one, behind the write of the chunk whose memory it takes."""
        for index in (number, number + 1):
            if index < len(self._chunks) and index not in self._reading:
                self._reading[index] = self._thread.submit(self._move, os.preadv, index)
        self._reading.pop(number).result()
        if into.is_cuda:
            into.copy_(self._staged[number % BUFFERS], non_blocking=True)

    def keep(self, number: int, source: Tensor) -> None:
        copied = None
        if source.is_cuda:
            self._staged[number % BUFFERS].copy_(source, non_blocking=True)
            copied = torch.cuda.current_stream(source.device).record_event()
        self._writing.append(self._thread.submit(self._move, os.pwritev, number, copied))
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()

    def arrays(self) -> Arrays:
        while self._writing:
            self._writing.popleft().result()
        return self._arrays

    def release(self, values: Tensor) -> None:
        if not values.numel():
            return
        first = values.storage_offset()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
        begin, end = first * values.itemsize // AROUND * AROUND, (first + extent) * values.itemsize
        # The mapping is shared: changes stay in the file.
        self._mapped.madvise(mmap.MADV_DONTNEED, begin, -(-(end - begin) // AROUND) * AROUND)

    def _move(self, call: Callable[[int, list[memoryview], int], int], number: int,
              copied: torch.cuda.Event | None = None) -> None:
        """Read or write all slots of a chunk. ``copied``: the point after which the chunk is in host memory."""
        if copied is not None:
            copied.synchronize()
        chunk = self._chunks[number]
        for array, row in zip(self._arrays[chunk.unit].values(), self._staged[number % BUFFERS], strict=True):
            left = memoryview(row[:chunk.end - chunk.begin].view(torch.uint8).numpy())
            place = (array.storage_offset() + chunk.begin) * array.itemsize
            while left:
                done = call(self._file.fileno(), [left], place)
                if not done:
                    raise OSError("the file of the optimizer's state ends too early")
                left, place = left[done:], place + done
