"""Sizes of a sweep, written as nccl-tests takes them: ``-b 8 -e 128M -f 2``."""

from __future__ import annotations

import re

from hpc_mp.base.errors import HpcMpError

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of ``8``, ``32K``, ``1.5M``, ``8G`` (powers of 1,024). Raises HpcMpError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise HpcMpError(f"size {text!r}", "is no number of bytes with K, M or G behind it", "write for example 8, 32K or 1G")
    return int(float(found[1]) * UNITS[found[2].upper()])


def sweep(begin: int, end: int, factor: int, step: int | None = None) -> tuple[int, ...]:
    """From ``begin`` to at most ``end`` bytes, each ``factor`` times the last one, or ``step`` bytes more.

    Raises:
        HpcMpError: there is no such sweep.
    """
    if begin < 1 or end < begin:
        raise HpcMpError(f"sizes from {begin} to {end}", "must ascend from 1 byte or more", "set -b and -e so that b <= e")
    if step is not None:
        if step < 1:
            raise HpcMpError(f"-i {step}", "must be at least 1 byte", "set a larger step")
        return tuple(range(begin, end + 1, step))
    if factor < 2:
        raise HpcMpError(f"-f {factor}", "must be at least 2", "set -f 2, or a step in bytes with -i")
    sizes = [begin]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)
