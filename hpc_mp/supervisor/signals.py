"""Signals to the supervisor while ranks run: SIGINT ends the ranks, all others ask them to save."""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

ASKED = "HPC_MP_ASKED"  # "1": the job script was asked to stop before this program ran
TAKEN = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
EARLY = tuple(code for number in (signal.SIGUSR2, signal.SIGTERM)  # srun or a task was asked to stop before it could handle that
              for code in (-number, 128 + number))
REPEAT_S = 2.0  # between two signals: srun does not forward one to a task that it has not started yet


class RunningStep(Protocol):
    """The part of ``subprocess.Popen`` that the supervisor uses for a step."""

    pid: int
    returncode: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


class Signals:
    """Handlers for the supervisor's signals. Slurm's SIGTERM to the whole job reaches the ranks by itself. If only this process
    got a SIGTERM, forwarding it would make srun kill the ranks. ``stop_requested``: True if ranks must save and stop. ``number``:
    the latest signal; None before the first. ``warn``: function that warns the ranks, instead of SIGUSR2 through srun."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.warn: Callable[[], None] | None = None
        self.stop_requested = os.environ.get(ASKED) == "1"
        self._ended = False
        self._sent = 0.0
        for number in TAKEN:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # for example by nohup
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2, signal.SIGTERM))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested, self.number = True, number
        self._ended = self._ended or number == signal.SIGINT

    def pass_on(self, step: RunningStep) -> None:
        """Forward the signal to the step, repeatedly while the step runs."""
        if self.stop_requested and time.monotonic() - self._sent > REPEAT_S:
            self._sent = time.monotonic()
            if self._ended or self.warn is None:
                step.send_signal(signal.SIGTERM if self._ended else signal.SIGUSR2)
            else:
                self.warn()

    def close(self) -> None:
        """Ignore further interrupts."""
        for number in TAKEN:
            signal.signal(number, signal.SIG_IGN)
