"""Asynchronous readback of a step's numbers: the host launches the next step before it reads them.

Reading a number from a GPU waits for all work launched before. A host that reads in every step launches the next one too late,
and the GPU idles. So a step's numbers are copied to pinned host memory behind all other work, and the host reads them after it
has launched the next step. A CPU computes synchronously; the host reads its numbers at the same point of the program.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Instant(NamedTuple):
    """A point in the work of a device. ``event`` is there on a GPU, and has passed when all work launched before it is done."""

    host: float
    event: torch.cuda.Event | None

    @staticmethod
    def here(device: torch.device) -> "Instant":
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
        return Instant(time.perf_counter(), event)

    def seconds_since(self, earlier: "Instant") -> float:
        """Return the seconds of device time between two instants. Both must have passed."""
        if self.event is None or earlier.event is None:
            return self.host - earlier.host
        return earlier.event.elapsed_time(self.event) / 1000


class Readback:
    """Numbers that the host reads later. ``values``: one-dimensional, on the device. ``began``: the beginning of the step that
    these numbers describe."""

    def __init__(self, values: Tensor, began: Instant) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._host.copy_(values, non_blocking=True)
        self._began, self._ended = began, Instant.here(values.device)

    @property
    def there(self) -> bool:
        """True if the numbers have arrived, so that ``read`` does not wait."""
        return self._ended.event is None or self._ended.event.query()

    def read(self) -> tuple[Sequence[float], float]:
        """Wait for the numbers. Return them, and the seconds of device time from ``began`` to their arrival."""
        if self._ended.event is not None:
            self._ended.event.synchronize()
        return self._host.tolist(), self._ended.seconds_since(self._began)


def read_now(counts: Tensor) -> list[int]:
    """Wait for a few counts, (n,), and return them. The host waits for nothing else in a step."""
    return [int(count) for count in Readback(counts, Instant.here(counts.device)).read()[0]]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device without blocking the host."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
