"""Compute speed of a node: the exact problem of ``doctor.compute``, repeated on one CPU."""

import os
import time
from dataclasses import dataclass

import numpy as np
import psutil

from hpc_mp.doctor.compute.problem import exact, whole

SIZE = 256  # rows and columns of one piece of work: some milliseconds
WINDOW_S = 0.3
"""Three times the period in which a cgroup gives and withholds CPU time: a window holds at most 4/3 of what it gives."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of one trial."""

    rate: float  # pieces of work per second of wall time, in the best window, which other programs disturb least
    share: float  # CPU time per wall time over all windows
    digest: str  # digest of the work, the same on every node; "" if two pieces on one node differ
    idle: float  # number of allowed processors that were idle meanwhile: a limit withheld them, not other programs


def compute(seconds: float) -> Computed:
    """Compute for some seconds and return the result."""
    left, right = exact(SIZE)
    begin, used, idle = time.monotonic(), time.thread_time(), _idle()
    digests: set[str] = set()
    best = 0.0
    while (start := time.monotonic()) - begin < seconds:
        count = 0
        while time.monotonic() - start < WINDOW_S:
            digests.add(whole(np.einsum("ij,jk->ik", left, right, optimize=False)))  # one thread, no library
            count += 1
        best = max(best, count / (time.monotonic() - start))
    share = (time.thread_time() - used) / (time.monotonic() - begin)
    return Computed(best, share, digests.pop() if len(digests) == 1 else "", (_idle() - idle) / (time.monotonic() - begin))


def _idle() -> float:
    """Return the idle seconds since boot, summed over the processors that this process may use."""
    times = psutil.cpu_times(percpu=True)
    return sum(times[cpu].idle for cpu in os.sched_getaffinity(0) if cpu < len(times))
