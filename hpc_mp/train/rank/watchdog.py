"""The step watchdog: it ends a rank whose steps do not come, however it hangs."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from types import TracebackType

from hpc_mp.train.rank.failures import Hung
from hpc_mp.train.rank.stall_clock import StallAwareClock
from hpc_mp.train.rank.waits import place, stack

FIRST = 3  # times as long may the first step take, which allocates, connects and compiles
TICKS = 20  # polls in the time of a step


class Watchdog:
    """``with`` it, ``fed`` must be called every ``timeout`` seconds; else ``on_hang`` is, in a thread of its own.

    Args:
        timeout: seconds; 0 = never.
        on_hang: called with where the main thread stands.
    """

    def __init__(self, timeout: float, on_hang: Callable[[Hung], None]) -> None:
        self._timeout = timeout
        self._on_hang = on_hang
        self._fed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def fed(self) -> None:
        self._fed.set()

    def _watch(self) -> None:
        clock = StallAwareClock(self._timeout / TICKS)
        due = FIRST * self._timeout
        while not self._closed.wait(self._timeout / TICKS):
            now = clock.now()
            if self._fed.is_set():
                self._fed.clear()
                due = now + self._timeout
            elif now >= due:
                self._on_hang(hung(self._timeout))
                return

    def __enter__(self) -> Watchdog:
        if self._timeout:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.set()


def hung(timeout: float) -> Hung:
    """Says where the main thread stands; its whole stack is a note."""
    frames = stack()
    error = Hung(f"no step was finished in {timeout:g} s; the rank stands in {place(frames)}")
    error.add_note("The main thread:\n" + "".join(traceback.format_list(frames)))
    return error
