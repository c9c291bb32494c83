"""A permutation of any size as a function of integers alone, by which samples are shuffled."""

import hashlib
import struct

ROUNDS = 8
WORD = (1 << 64) - 1


def permuted(place: int, size: int, *, seed: int, epoch: int) -> int:
    """Return the item at ``place`` of a permutation: for fixed (size, seed, epoch) a bijection of range(size).

    The permutation is a balanced Feistel network (Luby and Rackoff 1988) on the next even number of bits, walked along its cycle
    until the value is below ``size`` (Black and Rogaway 2002). This takes at most 4 steps on average. It is pure integer
    arithmetic and gives the same result on every machine.

    Args:
        place: 0 … size - 1.
        size: at least 1.
        seed, epoch: any integers; each pair gives its own order.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = struct.unpack(f"<{ROUNDS}Q", hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest())
    item = place
    while True:
        left, right = item >> half, item & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        item = left << half | right
        if item < size:
            return item


def _mix(word: int) -> int:
    """Spread 64 bits over 64 bits: the finalizer of SplitMix64 (Steele, Lea and Flood 2014, constants by Stafford)."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31
