"""What streaming takes of state that lies elsewhere than on a rank's device: the engine allocates it, the planner counts it."""

from __future__ import annotations

from collections.abc import Iterable

# Elements that the optimizer updates at once where its state streams: 4 MiB of each slot, with which a disk and a bus work at
# nearly full speed, and which are little of the memory that is to be saved.
CHUNK = 2**20
BUFFERS = 2  # one is updated while the other is written and filled


def buffer_elements(parts: Iterable[int]) -> int:
    """Elements of each buffer of a slot, for units of which a rank holds parts of these lengths."""
    return min(CHUNK, max(parts))
