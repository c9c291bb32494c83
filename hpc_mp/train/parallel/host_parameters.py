"""A rank's part of the parameters in host memory, with ZeRO-3: nothing of a unit is on the device but while it runs.

========= ===========================================================================================================
masters   in the masters' format. The update streams over them: a chunk comes to the device, is updated and goes back.
computed  the same values in the format that computes, which a request copies to the device to gather the unit there.
          Where both formats are the same it is the masters themselves.
========= ===========================================================================================================

On a GPU this memory is pinned, and copies out of it run in a stream of their own: behind what has been computed so far, for the
room that they fill may have been freed by that, and beside what is computed next. The gather of the unit follows in the same
stream, and who needs the parameters waits for both. What a copy reads is overwritten by the update alone, which waits for all
copies first (``Bus.settle``), and by the host, which does too (``Bus.synchronize``). On a CPU all is the same, without streams.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hpc_mp.train.device.precision import Precision
from hpc_mp.train.parallel.collectives import Running


class Bus:
    """The way of a rank's parameters from host memory to its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self) -> Iterator[torch.cuda.Stream | None]:
        """Start work behind everything that the current stream has been given so far, and beside what follows."""
        if self._stream is None:
            yield None
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield self._stream

    def settle(self) -> None:
        """Let the current stream wait for all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Let the host wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


class HostPart:
    """The part of a unit, (length,), in host memory.

    Attributes:
        master, computed: see above.
    """

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
        """The host has given the masters other values."""
        if self.computed is not self.master:
            self.bus.synchronize()
            self.computed.copy_(self.master)

    def arrive(self, own: Tensor, gather: Callable[[], Running]) -> Running:
        """Begin to fill ``own``, (length,) on the device, and to gather the unit from there."""
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
        """Fill the beginning of ``into``, on the device, with these elements of the masters."""
        into[:end - begin].copy_(self.master[begin:end], non_blocking=True)

    def keep(self, begin: int, end: int, source: Tensor) -> None:
        """Put updated masters back, in both formats."""
        for array in self.arrays:
            array[begin:end].copy_(source[:end - begin].to(array.dtype), non_blocking=True)


HostParts = Mapping[str, HostPart]  # by unit
