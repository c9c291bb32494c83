"""The interface of a measurable device, the result of one kind of work on it, and a node's processors as a device of numpy."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from hpc_mp.doctor.compute.problem import bits, exact


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


SIZE, BITS_SIZE = 1536, 384


class NumpyDevice:
    """The processors of the node; ``device`` is always "cpu"."""

    def __init__(self, device: str) -> None:
        if device != "cpu":
            raise RuntimeError(f"torch is not installed here: {device} cannot be measured")
        self.bus = ""
        self.kind = cpu_kind()
        self.software = f"numpy {np.__version__}"

    def check(self) -> Iterator[tuple[str, bool]]:
        left, right = exact()
        yield "exact fp32", bool(np.array_equal(left @ right, left.astype(np.float64) @ right.astype(np.float64)))

    def answers(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        left, right = bits(BITS_SIZE, 1), bits(BITS_SIZE, 2)
        yield "core", lambda: np.einsum("ij,jk->ik", left, right, optimize=False).tobytes()  # one thread, no library

    def one_thread(self) -> None:
        """Do nothing: einsum uses one thread."""

    def load(self, seconds: float) -> Iterator[tuple[str, Pieces]]:
        left, right = exact(SIZE)
        first, out = left @ right, np.empty((SIZE, SIZE), np.float32)
        yield "matmul fp32", repeat(lambda: np.matmul(left, right, out=out), 2 * SIZE**3 / 1e12, seconds,
                                    lambda: bool(np.array_equal(out, first)))
        source = np.zeros(1 << 26, np.float32)
        target = np.empty_like(source)
        yield "memory", repeat(lambda: np.copyto(target, source), 2 * source.nbytes / 1e9, seconds / 2)

    def copies(self) -> Iterator[tuple[str, Pieces]]:
        yield from ()
