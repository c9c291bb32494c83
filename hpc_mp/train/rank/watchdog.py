"""The watchdog: it ends a rank that stays in one phase of its work for too long, however it hangs.

A step that takes half an hour hangs; a checkpoint of terabytes that takes as long does not. Each phase has its own limit.
"""

import threading
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal

from hpc_mp.job.spec import Job, time_to_meet
from hpc_mp.train.rank.failures import Hung
from hpc_mp.train.rank.rendezvous import LATER
from hpc_mp.train.rank.stall_clock import StallAwareClock
from hpc_mp.train.rank.waits import place, stack

Phase = Literal["come", "meet", "start", "load", "first step", "step", "evaluation", "save"]

FIRST = 3  # factor for the first step, which allocates, connects and compiles; a pass of an evaluation may be first too
TICKS = 20  # polls within a limit
POLL_S = 5.0  # longest time between two polls: the next phase may have a shorter limit

LATE: Mapping[Phase, str] = {
    "come": "rank 0 did not answer where all ranks meet",
    "meet": "the ranks, who had met, were not connected",
    "start": "tokens, process groups and model were not ready",
    "load": "first values or a checkpoint's state were not read",
    "first step": "no step was finished",
    "step": "no step was finished",
    "evaluation": "no pass of an evaluation was finished",
    "save": "the checkpoint was not saved",
}


def limits(job: Job) -> dict[Phase, float]:
    """Return the limit of each phase in seconds; 0 = no limit."""
    meet = time_to_meet(job)
    come = meet and meet + 2 * LATER.total_seconds()  # the store's own limits, which know the missing ranks, must expire first
    return {"come": come, "meet": meet, "start": job.start_timeout, "load": job.load_timeout,
            "first step": FIRST * job.step_timeout, "step": job.step_timeout, "evaluation": FIRST * job.step_timeout,
            "save": job.save_timeout}


class Watchdog:
    """A watchdog: while it is entered, each phase announced by ``now`` must be followed by another call within its limit.
    ``limits``: seconds of every phase; 0 = no limit. ``on_hang``: called in a separate thread with an error that names the main
    thread's position. ``phase``: the first phase."""

    def __init__(self, limits: Mapping[Phase, float], on_hang: Callable[[Hung], None], phase: Phase = "meet") -> None:
        self._limits = limits
        self._on_hang = on_hang
        self._phase = phase
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def now(self, phase: Phase) -> None:
        """Begin this phase, or its next turn."""
        self._phase = phase
        self._changed.set()

    def _watch(self) -> None:
        tick = min([POLL_S, *(limit / TICKS for limit in self._limits.values() if limit)])
        clock = StallAwareClock(tick)
        began, phase = clock.now(), self._phase
        while not self._closed.wait(tick):
            now = clock.now()
            if self._changed.is_set():
                self._changed.clear()
                began, phase = now, self._phase
            elif self._limits[phase] and now - began >= self._limits[phase]:
                self._on_hang(hung(phase, self._limits[phase]))
                return

    def __enter__(self) -> "Watchdog":
        if any(self._limits.values()):
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.set()


def hung(phase: Phase, limit: float) -> Hung:
    """Return an error that states the late phase and the main thread's position, with its whole stack as a note."""
    frames = stack()
    error = Hung(f"{LATE[phase]} in {limit:g} s; the rank stands in {place(frames)}")
    error.add_note("The main thread:\n" + "".join(traceback.format_list(frames)))
    return error
