"""Mixtures: which files of ``data.files`` the sample at a position comes from, by ``data.weights``.

Positions are counted in blocks. In each block every part has its slots, in an order that is drawn anew for each block, so that a
short stretch of a run has nearly the shares of the whole. A part that ends is passed again, and each pass has its own order.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from hpc_mp.base.errors import HpcMpError
from hpc_mp.train.data.permutation import permuted

BLOCK = 1000  # positions; shares are exact to a thousandth


def slots(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the slots of each part in a block, in proportion to its weight, rounded by the method of the largest remainder.
    Raises HpcMpError if a part would have none."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: (whole[part] - exact[part], part))
    for part in by_remainder[:BLOCK - sum(whole)]:
        whole[part] += 1
    if 0 in whole:
        raise HpcMpError(f"data.weights[{whole.index(0)}] = {weights[whole.index(0)]:g}",
                         f"is less than a thousandth of all weights, {sum(weights):g}", "raise it, or leave those files out")
    return tuple(whole)


@lru_cache(maxsize=4)
def block_order(sizes: tuple[int, ...], seed: int, block: int) -> tuple[tuple[int, int], ...]:
    """Return, for each position of a block, its part and how many samples of this part come before it in the block. ``sizes``:
    the result of ``slots``."""
    ends, numbers = [*accumulate(sizes)], [0] * len(sizes)
    order = []
    for place in range(BLOCK):
        part = bisect_right(ends, permuted(place, BLOCK, seed=seed, epoch=-1 - block))
        order.append((part, numbers[part]))
        numbers[part] += 1
    return tuple(order)
