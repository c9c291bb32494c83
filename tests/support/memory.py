"""The memory of a forked process, counted from a moment on."""

import ctypes
from pathlib import Path

M_MMAP_THRESHOLD = -3  # of mallopt(3)


def measure_from_here() -> None:
    """In a fork: what its parent had free goes back to the system, what is large comes from there and goes back there, and the
    largest memory is counted anew. Otherwise two runs would differ by what their parents have done before: memory that was
    free at the fork is resident already, and taking it is no growth."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
