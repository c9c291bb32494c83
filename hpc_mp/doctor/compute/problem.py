"""Test problems whose answers are known, or must be equal on equal devices.

*Exact*: small integers. Every product and every sum is an integer that fp32 represents exactly, in any order of summation.
There is therefore one right answer for every device, library and layout, and its digest is known here.

*Bits*: numbers that use the whole mantissa. The answer depends on the order of summation and is the same if the same library
runs on the same kind of device. It finds faults that small integers do not trigger.
"""

import hashlib
from typing import Any

import numpy as np

SIZE = 1024  # rows and columns of the exact problem: sums stay below 16 × 1024 < 2**15: exact in fp32, rounded once in bf16
KNOWN = "bbbf0da4330a7e2f97ffe5c9f13dc48d"  # whole() of the answer, computed in integers


def exact(size: int = SIZE) -> tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.float32]]]:
    """Return two matrices of integers in −4…4."""
    row, column = np.indices((size, size), dtype=np.int64)
    left = (row * 31 + column * 17 + row * column % 7) % 9 - 4
    right = (row * 13 + column * 29 + (row + 2 * column) % 11) % 9 - 4
    return left.astype(np.float32), right.astype(np.float32)


def bits(size: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return numbers in −1…1 from a hash of their index (splitmix32): equal on every machine and with every library."""
    low = np.uint64(0xFFFFFFFF)
    value = np.arange(size * size, dtype=np.uint64) + np.uint64(seed * 0x9E3779B9) & low
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor) & low
    value ^= value >> np.uint64(15)
    return (value.astype(np.float64) / 2**31 - 1).astype(np.float32).reshape(size, size)


def digest(answer: bytes) -> str:
    """Return the digest of all bits of an answer."""
    return hashlib.blake2b(answer, digest_size=16).hexdigest()


def whole(answer: np.ndarray[Any, Any]) -> str:
    """Return the digest of an answer to the exact problem. It is equal for all types that represent the answer exactly."""
    return digest(np.rint(answer.astype(np.float64)).astype("<i4").tobytes())
