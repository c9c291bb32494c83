"""How fast a node computes: a fixed piece of work, again and again, on one CPU."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass

import psutil

BLOCK = bytes(range(256)) * 1024  # 256 KiB
PIECES = 4  # blocks of one piece of work: some milliseconds
WINDOW_S = 0.3
"""Three times the period in which a cgroup gives and withholds CPU time: a window holds at most 4/3 of what it gives."""


@dataclass(frozen=True, slots=True)
class Computed:
    """
    Attributes:
        rate: pieces of work per second of wall time, in the best window: others who want the CPU too disturb it least.
        share: CPU time per wall time over all windows.
        digest: of the work, the same on every node; "" where two pieces of one node differ.
        idle: processors, of those that it may use, that stood idle meanwhile: a limit kept it from them, not somebody's work.
    """

    rate: float
    share: float
    digest: str
    idle: float


def compute(seconds: float) -> Computed:
    """Work for some seconds."""
    begin, used, idle = time.monotonic(), time.thread_time(), _idle()
    digests: set[str] = set()
    best = 0.0
    while (now := time.monotonic()) - begin < seconds:
        count = 0
        while time.monotonic() - now < WINDOW_S:
            digests.add(_piece())
            count += 1
        best = max(best, count / (time.monotonic() - now))
    share = (time.thread_time() - used) / (time.monotonic() - begin)
    return Computed(best, share, digests.pop() if len(digests) == 1 else "", (_idle() - idle) / (time.monotonic() - begin))


def _idle() -> float:
    """Seconds since boot in which the processors that this process may use stood idle."""
    times = psutil.cpu_times(percpu=True)
    return sum(times[cpu].idle for cpu in os.sched_getaffinity(0) if cpu < len(times))


def _piece() -> str:
    digest = hashlib.sha256()
    for _ in range(PIECES):
        digest.update(BLOCK)
    return digest.hexdigest()
