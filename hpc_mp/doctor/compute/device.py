"""The interface of a measurable device, and the result of one kind of work on it."""

from __future__ import annotations

import os
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
