"""Buffers for streaming state that is not on a rank's device: the engine allocates them, the planner counts them."""

from collections.abc import Iterable

# Elements that the optimizer updates at once if its state streams: 4 MiB of each slot. A disk and a bus work at nearly full
# speed with it, and it is small compared with the memory saved.
CHUNK = 2**20
SHARE = 64  # a chunk of less state is 1/SHARE of it, so that the buffers are a thirtieth of what is saved with them
GRAIN = 2**12  # elements: a chunk is a multiple of it, for vector instructions and pages
BUFFERS = 2  # one is updated while the other is written and filled


def chunk_elements(parts: Iterable[int]) -> int:
    """Return the elements of the longest chunk, and of a slot's row of a buffer, for a rank with parts of these lengths."""
    lengths = list(parts)
    return min(CHUNK, max(lengths, default=0), -(-sum(lengths) // (SHARE * GRAIN)) * GRAIN)
