"""What a process does that was just forked: it dies with its parent, and writes into a log of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """Let the kernel kill this process when ``parent`` ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


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


def redirect(log: Path) -> None:
    """Nothing on standard input; output and errors appended to ``log``, line by line."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
