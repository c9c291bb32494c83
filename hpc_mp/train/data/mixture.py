"""Mixtures: which files of ``data.files`` the sample at a position comes from, by ``data.weights``.

Positions are counted in blocks. In each block every part has its slots, in an order that is drawn anew for each block, so that a
short stretch of a run has nearly the shares of the whole. A part that ends is passed again, and each pass has its own order.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from hpc_mp.base.errors import HpcMpError

BLOCK = 1000  # positions; shares are exact to a thousandth


def slots(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the slots of each part in a block, in proportion to its weight, rounded by the method of the largest remainder.

    Raises:
        HpcMpError: a part would have none.
    """
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: (whole[part] - exact[part], part))
    for part in by_remainder[:BLOCK - sum(whole)]:
        whole[part] += 1
    if 0 in whole:
        raise HpcMpError(f"data.weights[{whole.index(0)}] = {weights[whole.index(0)]:g}",
                         f"is less than a thousandth of all weights, {sum(weights):g}", "raise it, or leave those files out")
    return tuple(whole)


def drawn(slot: int, block: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the part that has a slot, and how many samples of this part come before it in all blocks."""
    ends = [*accumulate(sizes)]
    part = bisect_right(ends, slot)
    return part, block * sizes[part] + slot - (ends[part] - sizes[part])
