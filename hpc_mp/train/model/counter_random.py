"""Random numbers that depend only on a key and an element's index, so that a rank draws only its own slices.

Elements 2i and 2i + 1 of a tensor come from word i of a Philox stream (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011), which numpy guarantees not to change between releases. The word's two halves become two normal numbers (Box
and Muller, Annals of Mathematical Statistics 29, 1958). The result does not depend on other draws or on their order.
"""

import hashlib
from collections.abc import Callable
from math import prod, tau

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from hpc_mp.layout.flat import Box, stretches

# Philox gives 4 words per count. Logarithm and cosine of a vector register may differ in the last bit from those of a single
# number. Therefore an element is always computed at the same place within a line, whichever part is drawn.
WORDS = 4
PAIR = 2  # elements of a word
LINE = 128  # elements: 64 pairs, a multiple of every vector register, unrolled four times
LONG = 1 << 15  # elements that are computed at once: they fit into a processor's cache

Numbers = Callable[[NDArray[np.uint64]], NDArray[np.float32]]  # words -> two numbers of each


def key_of(seed: int, name: str) -> int:
    """Return the key of a tensor's stream."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), "little")


def normal(key: int, shape: tuple[int, ...], box: Box) -> NDArray[np.float32]:
    """Return standard normal numbers for a part of a tensor of this shape. ``box``: the part, a slice for each dimension."""
    return _drawn(_normal, key, shape, box)


def uniform(key: int, shape: tuple[int, ...], box: Box) -> NDArray[np.float32]:
    """Return numbers that are uniform from -1 to 1, otherwise as ``normal``."""
    return _drawn(_uniform, key, shape, box)


def _drawn(numbers: Numbers, key: int, shape: tuple[int, ...], box: Box) -> NDArray[np.float32]:
    """Return numbers for a part of a tensor."""
    sizes = tuple(part.stop - part.start for part in box)
    values = np.empty(prod(sizes), np.float32)
    done = 0
    for start, length in stretches(shape, box):
        for begin in range(start, start + length, LONG):
            count = min(LONG, start + length - begin)
            first = begin - begin % LINE
            values[done:done + count] = numbers(_words(key, first, begin + count - first))[begin - first:begin - first + count]
            done += count
    return values.reshape(sizes)


def _words(key: int, first: int, count: int) -> NDArray[np.uint64]:
    """Return the words of ``count`` elements of a key's stream, and of the rest of their last line, from element ``first`` on."""
    stream = Philox(key=key)
    stream.advance(first // (PAIR * WORDS))
    return stream.random_raw((count + -count % LINE) // PAIR).astype("<u8", copy=False)


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float32]:
    return words.view("<i4").astype(np.float32) * np.float32(2**-31)


def _normal(words: NDArray[np.uint64]) -> NDArray[np.float32]:
    high, low = words.view("<u4")[1::2].astype(np.float32), words.view("<i4")[0::2].astype(np.float32)
    radius = np.sqrt(np.float32(-2) * np.log((high + np.float32(0.5)) * np.float32(2**-32)))  # never of 0: at most 6.8
    angle = low * np.float32(tau * 2**-32)
    values = np.empty(PAIR * len(words), np.float32)
    np.multiply(radius, np.cos(angle), out=values[0::2])
    np.multiply(radius, np.sin(angle), out=values[1::2])
    return values
