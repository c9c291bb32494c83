"""What reaches the host while ranks run: SIGUSR2 and SIGTERM ask them to save, SIGINT ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from types import FrameType

ASKED = "HPC_MP_ASKED"  # "1": the job script was asked to stop before this program was there
AGAIN = 2.0  # seconds between two tellings: srun passes nothing on to a task that it has not started yet


class Signals:
    """Slurm's SIGTERM to the whole job reaches ranks by itself; one to this process alone would make srun kill them.

    Attributes:
        asked: whether ranks are to save and stop.
    """

    def __init__(self) -> None:
        self.asked = os.environ.get(ASKED) == "1"
        self._ended = False
        self._told = 0.0
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2, signal.SIGTERM))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._ended = self._ended or number == signal.SIGINT

    def pass_on(self, step: subprocess.Popen[bytes]) -> None:
        """Tell the step, and tell it again as long as it runs."""
        if self.asked and time.monotonic() - self._told > AGAIN:
            self._told = time.monotonic()
            step.send_signal(signal.SIGTERM if self._ended else signal.SIGUSR2)

    def close(self) -> None:
        """From here on nothing may interrupt."""
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
