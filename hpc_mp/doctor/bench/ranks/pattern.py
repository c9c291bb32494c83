"""Test data that reveal every error of a collective: small integers, so that sums are exact in any order and type.

A table of ``PERIOD`` numbers per rank is repeated over a buffer. The period is prime: data at a wrong offset or from a wrong
rank differ from the expected data.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_mp.planner.collectives import Collective

PERIOD = 8191
ADDENDS = 8  # ranks that add to one element: 8 × 31 = 248 is exact in bfloat16 too, whose exact integers end at 256
Table = NDArray[np.float64]


def numbers(rank: int, repetition: int, largest: int) -> Table:
    """Return ``PERIOD`` pseudo-random numbers from 1 to ``largest`` for this rank and repetition."""
    index = np.arange(PERIOD, dtype=np.uint64)
    mixed = index * np.uint64(2654435761) + np.uint64(rank * 40503 + repetition * 97) * np.uint64(2246822519)
    mixed ^= mixed >> np.uint64(15)
    mixed *= np.uint64(2654435761)
    return ((mixed >> np.uint64(16)) % np.uint64(largest) + np.uint64(1)).astype(np.float64)


def addend(rank: int, ranks: int, repetition: int) -> Table:
    """Return the addends of ``rank``: 0 except for the elements to which it is one of ``ADDENDS`` adding ranks."""
    chosen = (np.arange(PERIOD) + rank) % ranks < ADDENDS
    return np.where(chosen, numbers(rank, repetition, 31), 0.0)


def total(ranks: int, repetition: int) -> Table:
    """Return the sum of the addends of all ranks."""
    summed = np.zeros(PERIOD)
    for rank in range(ranks):
        summed += addend(rank, ranks, repetition)
    return summed


def shifted(table: Table, start: int) -> Table:
    """Return the table as seen from element ``start`` of a buffer."""
    return np.roll(table, -(start % PERIOD))


def write(buffer: Any, table: Any) -> None:
    """Repeat ``table`` over ``buffer``: one-dimensional tensors or arrays, both on one device."""
    length = len(buffer) // PERIOD * PERIOD
    buffer[:length].reshape(-1, PERIOD)[...] = table
    buffer[length:] = table[: len(buffer) - length]


def wrong(buffer: Any, table: Any) -> int:
    """Return the number of elements of ``buffer`` that differ from the repeated ``table``."""
    length = len(buffer) // PERIOD * PERIOD
    rows = buffer[:length].reshape(-1, PERIOD) != table
    tail = buffer[length:] != table[: len(buffer) - length]
    return int(rows.sum()) + int(tail.sum())


def sent(collective: Collective, rank: int, ranks: int, repetition: int) -> Table:
    """Return the table that ``rank`` of a group sends, starting at element 0 of its buffer."""
    return addend(rank, ranks, repetition) if collective.reduces else numbers(rank, repetition, 251)


def received(collective: Collective, rank: int, ranks: int, repetition: int, part: int) -> list[Table]:
    """Return the tables of the equal consecutive shares of ``rank``'s buffer; ``part``: number of elements of one rank's part."""
    if collective.reduces:
        return [shifted(total(ranks, repetition), rank * part if collective.receive_part else 0)]
    sources = {"all_gather": range(ranks), "all_to_all": range(ranks), "broadcast": [0], "sendrecv": [(rank - 1) % ranks]}
    start = rank * part if collective.name == "all_to_all" else 0
    return [shifted(numbers(source, repetition, 251), start) for source in sources[collective.name]]
