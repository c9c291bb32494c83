"""A clock for those who wait for a sign of life."""

from __future__ import annotations

import time


class StallAwareClock:
    """Seconds that this process was awake for: a pause of it (SIGSTOP, gang scheduling, a suspended machine, a long call
    that keeps Python's lock) counts as two ticks at most. Whoever slept must not blame others for their silence.

    Args:
        tick: seconds; it is read at least so often.
    """

    def __init__(self, tick: float) -> None:
        self._tick = tick
        self._awake = 0.0
        self._last = time.monotonic()

    def now(self) -> float:
        last, self._last = self._last, time.monotonic()
        self._awake += min(self._last - last, 2 * self._tick)
        return self._awake
