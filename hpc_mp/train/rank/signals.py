"""Stop requests: by a signal, by the trigger file, by the clock. They only set a flag; ranks agree on it between steps.

torch is not imported here: a flag can exist while torch is being imported.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
STOP_FILE, TIME_LIMIT = 1000, 1001
REASONS: dict[int, str] = {
    **{int(number): f"asked to by {number.name}" for number in STOPPING}, STOP_FILE: "stop file", TIME_LIMIT: "time limit"}
EXIT_STOPPED = os.EX_TEMPFAIL  # 75: stopped on request after saving; the run can be continued


class Stopped(Exception):
    """The run was asked to stop before its first step: there is nothing to save."""


class StopFlag:
    """The first reason to stop: one of ``REASONS``; 0 if there is none."""

    def __init__(self) -> None:
        self.reason = 0
        for number in STOPPING:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # the job script blocked signals that came too early

    def set(self, reason: int) -> None:
        self.reason = self.reason or reason

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.set(number)


@contextmanager
def ending_in(seconds: float) -> Iterator[None]:
    """Let a stop request end the process after that many seconds, while there is nothing to save. The main thread calls it,
    and may then be blocked in a library and not notice the request."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    over = threading.Event()

    def watch() -> None:
        while number := os.read(reader, 1):  # Python writes the number of each signal, whatever the main thread does
            if number[0] in STOPPING and not over.wait(seconds):
                print(f"hpc-mp: {REASONS[number[0]]} before all ranks had met; it ends", file=sys.stderr, flush=True)
                os._exit(EXIT_STOPPED)

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="stop requests", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(writer)
        watcher.join()
        os.close(reader)


@dataclass
class Pace:
    """Seconds that the last step and the last save took."""

    step: float = 0.0
    save: float = 0.0


@dataclass(frozen=True)
class StopConditions:
    """The reasons to stop that rank 0 polls for because no signal announces them. ``trigger``: the file that stops the run.
    ``end``: unix time in seconds at which the scheduler ends the job; None without a limit. ``grace``: seconds before ``end`` in
    which to save and stop; more are taken if steps and a save take longer."""

    flag: StopFlag
    pace: Pace
    trigger: Path
    end: float | None = None
    grace: float = 0.0

    def check(self) -> None:
        margin = max(self.grace, 2 * self.pace.save + 3 * self.pace.step)  # ranks stop after the step that follows this one
        if self.trigger.exists():
            self.flag.set(STOP_FILE)
        elif self.end is not None and time.time() >= self.end - margin:
            self.flag.set(TIME_LIMIT)
