"""Stores of streamed optimizer state: the host's memory, the device's memory, and a file on a disk of the node."""

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.offload import BUFFERS
from hpc_mp.train.optimizer.optimizer_state import Arrays, Chunk, StateBytesAt, StateShape

AROUND = 2 << 20  # bytes: Linux may map an aligned block of this size of a file when one byte of it is read (a large folio)


class MemoryStore:
    """Arrays that are always in memory.

    Args:
        place: "host" for pinned memory of the host; "device" for that of the device, if only the masters stream.
    """

    def __init__(self, place: Literal["host", "device"], shape: StateShape, chunks: Sequence[Chunk],
                 buffers: Sequence[Tensor]) -> None:
        on_host = place == "host"
        self.nbytes = StateBytesAt(**{place: shape.nbytes})
        self._arrays = shape.zeros(torch.device("cpu") if on_host else buffers[0].device, on_host and buffers[0].is_cuda)
        self._rows = [[whole[chunk.begin:chunk.end] for whole in self._arrays[chunk.unit].values()] for chunk in chunks]

    def fetch(self, number: int, into: Tensor) -> None:
        for row, target in zip(self._rows[number], into, strict=True):
            target[:len(row)].copy_(row, non_blocking=True)

    def keep(self, number: int, source: Tensor) -> None:
        for row, updated in zip(self._rows[number], source, strict=True):
            row.copy_(updated[:len(row)], non_blocking=True)

    def arrays(self) -> Arrays:
        return self._arrays

    def release(self, values: Tensor) -> None:
        pass


class FileStore:
    """An unnamed file of this rank in a directory of its node.

    No other process can open it, and it vanishes with the rank, however that ends. One thread reads and writes in the order of
    the calls.

    Raises:
        HpcMpError: the directory does not exist, or has not enough room.
    """

    def __init__(self, directory: Path, shape: StateShape, chunks: Sequence[Chunk], buffers: Sequence[Tensor]) -> None:
        self._shape, self._chunks, self.nbytes = shape, chunks, StateBytesAt(disk=shape.nbytes)
        self._begins: dict[tuple[str, str], int] = {}
        end = 0
        for unit, slot in product(shape.lengths, shape.slots):
            self._begins[unit, slot], end = end, end + shape.lengths[unit] * shape.dtype.itemsize
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  # open as long as the rank lives
            os.posix_fallocate(self._file.fileno(), 0, end)  # zeros, in reserved room
        except OSError as error:
            raise HpcMpError(f"parallel.offload_directory = {directory}",
                             f"cannot hold {end} bytes of optimizer state on {os.uname().nodename} ({error.strerror})",
                             "name a directory that every node has on a disk of its own, with room for all its ranks") from None
        self._staged = [torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True) if buffer.is_cuda else buffer
                        for buffer in buffers]  # a disk reads into host memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="optimizer state")
        self._reading: dict[int, Future[None]] = {}
        self._writing: deque[Future[None]] = deque()
        self._mapped: mmap.mmap | None = None

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
        self._writing.append(self._thread.submit(self._write, number, copied))
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()

    def arrays(self) -> Arrays:
        """Return the file, mapped into memory: only pages that are used are read."""
        while self._writing:
            self._writing.popleft().result()
        if self._mapped is None:
            self._mapped = mmap.mmap(self._file.fileno(), 0)
        shape, mapped = self._shape, self._mapped
        return {unit: {slot: torch.frombuffer(mapped, dtype=shape.dtype, count=length, offset=self._begins[unit, slot])
                       for slot in shape.slots} for unit, length in shape.lengths.items()}

    def release(self, values: Tensor) -> None:
        if self._mapped is None or not values.numel():
            return
        first = values.data_ptr() - torch.frombuffer(self._mapped, dtype=torch.uint8).data_ptr()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
        begin, end = first // AROUND * AROUND, first + extent * values.element_size()
        # The mapping is shared: changes stay in the file.
        self._mapped.madvise(mmap.MADV_DONTNEED, begin, -(-(end - begin) // AROUND) * AROUND)

    def _write(self, number: int, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        self._move(os.pwritev, number)

    def _move(self, call: Callable[[int, list[memoryview], int], int], number: int) -> None:
        """Read or write all slots of a chunk."""
        chunk = self._chunks[number]
        for slot, row in zip(self._shape.slots, self._staged[number % BUFFERS], strict=True):
            left = memoryview(row[:chunk.end - chunk.begin].view(torch.uint8).numpy())
            place = self._begins[chunk.unit, slot] + chunk.begin * self._shape.dtype.itemsize
            while left:
                done = call(self._file.fileno(), [left], place)
                if not done:
                    raise OSError("the file of the optimizer's state ends too early")
                left, place = left[done:], place + done
