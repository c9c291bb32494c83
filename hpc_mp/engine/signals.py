"""Stop requests. A handler only sets a flag; ranks agree on it at a step boundary."""

from __future__ import annotations

import os
import signal
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
EXIT_STOPPED = os.EX_TEMPFAIL  # 75: stopped on request after saving; the run can go on


class StopFlag:
    """Set by the first SIGTERM, SIGINT or SIGUSR2."""

    def __init__(self) -> None:
        self.name: str | None = None
        for number in STOPPING:
            signal.signal(number, self._set)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
