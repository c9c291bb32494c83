"""A process that does not see the ends of its children. Apart from ``child``, which every rank imports in its first moments."""

from __future__ import annotations

import time

import psutil


class DeadChildren:
    """Notices a process that has children and sees the end of none: mpirun of Open MPI 5 misses it where all end at once."""

    def __init__(self, pid: int, patience: float) -> None:
        """
        Args:
            patience: seconds that it has for seeing it.
        """
        self._pid, self._patience, self._since = pid, patience, time.monotonic()

    def noticed(self) -> bool:
        """Whether all its children have been dead, and there, for as long."""
        try:
            states = [child.status() for child in psutil.Process(self._pid).children()]
        except psutil.Error:
            states = []
        if not states or any(state != psutil.STATUS_ZOMBIE for state in states):
            self._since = time.monotonic()
        return time.monotonic() - self._since >= self._patience
