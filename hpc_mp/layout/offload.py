"""What streaming takes of state that lies elsewhere than on a rank's device: the engine allocates it, the planner counts it."""

from __future__ import annotations

from collections.abc import Iterable

# Elements that the optimizer updates at once where its state streams: 4 MiB of each slot, with which a disk and a bus work at
# nearly full speed, and which are little of the memory that is to be saved.
CHUNK = 2**20
SHARE = 64  # a chunk of less state is this part of it, so that the buffers are a thirtieth of what is saved with them
GRAIN = 2**12  # elements: a chunk is a multiple of them, for the sake of vector instructions and pages
BUFFERS = 2  # one is updated while the other is written and filled


def chunk_elements(parts: Iterable[int]) -> int:
    """Elements of the longest chunk, and of a slot's row of a buffer, for units of which a rank holds parts of these lengths."""
    lengths = list(parts)
    return min(CHUNK, max(lengths), -(-sum(lengths) // (SHARE * GRAIN)) * GRAIN)
