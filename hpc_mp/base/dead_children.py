"""Detection of a process that does not notice that its children ended. Not in ``child``, which every rank imports."""

import time

import psutil


class DeadChildren:
    """Detector of a process whose children have all ended unnoticed: mpirun of Open MPI 5 misses it if all end at once."""

    def __init__(self, pid: int, patience: float) -> None:
        """
        Args:
            patience: seconds that the process has to notice it.
        """
        self._pid, self._patience, self._since = pid, patience, time.monotonic()

    def noticed(self) -> bool:
        """Return True if all its children have been zombies for ``patience`` seconds."""
        try:
            states = [child.status() for child in psutil.Process(self._pid).children()]
        except psutil.Error:
            states = []
        if not states or any(state != psutil.STATUS_ZOMBIE for state in states):
            self._since = time.monotonic()
        return time.monotonic() - self._since >= self._patience
