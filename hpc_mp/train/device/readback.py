"""Numbers of a step on their way to the host, which launches the next step meanwhile.

Asking a GPU for a number waits for all that was launched before: a host that asks in every step launches the next one too late,
and the GPU waits in turn. So a step's numbers are copied to memory that the device can write to (pinned), behind all else, and
read when the next step has been launched. A CPU computes at once, and the same numbers are read at the same moment.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Instant:
    """A point in a device's work: everything launched before it is behind it."""

    host: float
    event: torch.cuda.Event | None

    @staticmethod
    def here(device: torch.device) -> "Instant":
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
        return Instant(time.perf_counter(), event)

    @property
    def passed(self) -> bool:
        """Whether the device has come here."""
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """The host waits until the device has come here."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: "Instant") -> float:
        """Of the device's time; both have been waited for."""
        if self.event is None or earlier.event is None:
            return self.host - earlier.host
        return earlier.event.elapsed_time(self.event) / 1000


class Readback:
    """Numbers that the host reads later.

    Args:
        values: one-dimensional, on the device.
        began: when the device began with what they are about.
    """

    def __init__(self, values: Tensor, began: Instant) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._host.copy_(values, non_blocking=True)
        self._began, self._ended = began, Instant.here(values.device)

    @property
    def there(self) -> bool:
        """Whether they have come, so that nobody waits for them."""
        return self._ended.passed

    def read(self) -> Sequence[float]:
        """The host waits for them."""
        self._ended.wait()
        found: list[float] = self._host.tolist()
        return found

    @property
    def seconds(self) -> float:
        """From the beginning until they were there; to be asked for after ``read``."""
        return self._ended.seconds_since(self._began)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; the host does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
