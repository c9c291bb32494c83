"""The interface of a measurable device, and the result of one kind of work on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol


class Pieces(NamedTuple):
    """Rates of the pieces of a run, in its unit; ``steady``: True if all results were equal; ``share``: CPU time it got."""

    rates: tuple[float, ...]
    steady: bool
    share: float | None = None


class ComputeDevice(Protocol):
    """A device that can be measured."""

    kind: str
    software: str
    bus: str  # PCI address, empty for processors

    def check(self) -> Iterator[tuple[str, bool]]: ...
    def answers(self) -> Iterator[tuple[str, Callable[[], bytes]]]: ...
    def one_thread(self) -> None: ...
    def load(self, seconds: float) -> Iterator[tuple[str, Pieces]]: ...
    def copies(self) -> Iterator[tuple[str, Pieces]]: ...


def cpu_name() -> str:
    """Return the processor's name as the kernel reports it."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(("model name", "CPU part"))]
    return names[0] if names else os.uname().machine


def cpu_kind() -> str:
    """Return name and number of the processors that this process may use."""
    return f"{cpu_name()}, {len(os.sched_getaffinity(0))} CPUs"


def repeat(step: Callable[[], object], work: float, seconds: float, same: Callable[[], bool] | None = None, batch: int = 1,
           wait: Callable[[], object] = lambda: None) -> Pieces:
    """Repeat ``step`` for ``seconds``. Return the rate of every piece, and True if the result was the same each time.

    Args:
        work: work of one step, in the unit of the rates per second.
        same: function that compares the last result with the first.
        batch: steps between two timestamps.
        wait: function that returns once the device has done all steps.
    """
    step()  # warm-up: selects kernels and raises clocks
    wait()
    rates: list[float] = []
    steady, start, used = True, time.monotonic(), time.process_time()
    while not rates or time.monotonic() < start + seconds:
        begin = time.perf_counter()
        for _ in range(batch):
            step()
        wait()
        rates.append(batch * work / (time.perf_counter() - begin))
        steady = steady and (same is None or same())
    share = (time.process_time() - used) / (time.monotonic() - start) / len(os.sched_getaffinity(0))
    return Pieces(tuple(rates), steady, share)
