"""A clock for threads that wait for a sign of life."""

import time


class StallAwareClock:
    """A clock of the seconds that this process was awake.

    A pause (SIGSTOP, gang scheduling, a suspended machine, a long call that holds Python's lock) counts as two ticks at most, so
    that a paused process does not blame others for their silence. ``tick``: longest time in seconds between two readings of the
    clock. ``paused``: True if the process was paused before the last reading.
    """

    def __init__(self, tick: float) -> None:
        self._tick = tick
        self._awake = 0.0
        self.paused = False
        self._last = time.monotonic()

    def now(self) -> float:
        last, self._last = self._last, time.monotonic()
        self.paused = self._last - last > 2 * self._tick
        self._awake += min(self._last - last, 2 * self._tick)
        return self._awake
