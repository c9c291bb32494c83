"""Measurement with numpy if torch is not installed: all processors of the node."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hpc_mp.doctor.compute.device import Pieces, cpu_kind, repeat
from hpc_mp.doctor.compute.problem import bits, exact

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
