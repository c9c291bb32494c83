"""A rank's part of the parameters in host memory, with ZeRO-3: the parameters of a unit are on the device only while it runs.

========= ===========================================================================================================
masters   in the masters' format. The update streams over them: a chunk is copied to the device, updated and copied back.
computed  the same values in the format of computation. A request copies them to the device, where the unit is unsharded.
          If both formats are the same, these are the masters themselves.
========= ===========================================================================================================

On a GPU this memory is pinned, and copies from it run in a separate stream: behind the work launched so far, which may have freed
the memory that they fill, and in parallel with later work. The all-gather of the unit follows in the same stream; a computation
with the parameters waits for both. The sources of copies are overwritten by the update, which first waits for all copies
(``Bus.settle``), and by the host, which does the same (``Bus.synchronize``). On a CPU the same happens without streams.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hpc_mp.train.device.precision import Precision
from hpc_mp.train.parallel.collectives import Running


class Bus:
    """The stream of a rank's copies between host memory and its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self) -> Iterator[torch.cuda.Stream | None]:
        """Run the block's work behind all work in the current stream so far, and in parallel with later work."""
        if self._stream is None:
            yield None
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield self._stream

    def settle(self) -> None:
        """Make the current stream wait for all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Make the host wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


class HostPart:
    """The part of a unit, (length,), in host memory. ``master``, ``computed``: (length,), see above."""

    def __init__(self, length: int, precision: Precision, bus: Bus) -> None:
        self.bus = bus
        pinned = bus.device.type == "cuda"
        self.master = torch.empty(length, dtype=precision.master, pin_memory=pinned)
        same = precision.master == precision.compute
        self.computed = self.master if same else torch.empty(length, dtype=precision.compute, pin_memory=pinned)

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (self.master,) if self.computed is self.master else (self.master, self.computed)

    def filled(self) -> None:
        """Update ``computed`` after the host has changed the masters."""
        if self.computed is not self.master:
            self.bus.synchronize()
            self.computed.copy_(self.master)

    def arrive(self, own: Tensor, gather: Callable[[], Running]) -> Running:
        """Begin to fill ``own``, (length,) on the device, and to all-gather the unit from it."""
        with self.bus.copying() as stream:
            own.copy_(self.computed, non_blocking=True)
            copied = None if stream is None else stream.record_event()
            gathering = gather()

        def finish() -> None:
            if copied is not None:
                torch.cuda.current_stream(self.bus.device).wait_event(copied)
            gathering.wait()

        return Running(finish=finish)

    def fetch(self, begin: int, end: int, into: Tensor) -> None:
        """Copy these elements of the masters to the beginning of ``into``, on the device."""
        into[:end - begin].copy_(self.master[begin:end], non_blocking=True)

    def keep(self, begin: int, end: int, source: Tensor) -> None:
        """Copy updated masters back, in both formats."""
        for array in self.arrays:
            array[begin:end].copy_(source[:end - begin].to(array.dtype), non_blocking=True)


HostParts = Mapping[str, HostPart]  # by unit
