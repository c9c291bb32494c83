"""Slurm's bracket form of host lists, ``n[1-4,7]``, read and written in order.

The order is kept because Slurm's own lists are not always sorted (with ``TopologyParam=SwitchAsNodeRank`` they follow
the switches) and a node's place in the list is its ``SLURM_NODEID``; libraries for host lists sort, or are GPL.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from hpc_mp.errors import HpcMpError

_NAME = r"(?:[^\[\],\s]|\[[0-9,-]+\])+"


def expand(nodelist: str) -> tuple[str, ...]:
    """The host names of a list, as ``scontrol show hostnames`` prints them: ``n[08-10],x`` is n08, n09, n10, x.

    Raises:
        HpcMpError: the text is not a host list.
    """
    if nodelist and not re.fullmatch(f"{_NAME}(,{_NAME})*", nodelist):
        raise _malformed(nodelist)
    return tuple(host for name in re.findall(_NAME, nodelist) for host in _expand_name(name, nodelist))


def compress(hosts: Iterable[str]) -> str:
    """A list that expands to ``hosts`` in the same order, as ``scontrol show hostlist`` prints it."""
    runs: list[tuple[str, str, str]] = []  # prefix, first and last number of names that follow each other
    for host in hosts:
        prefix = host.rstrip("0123456789")
        number = host[len(prefix):]
        if number and runs and runs[-1][0] == prefix and number == _successor(*runs[-1][1:]):
            runs[-1] = (prefix, runs[-1][1], number)
        else:
            runs.append((prefix, number, number))
    return ",".join(_brackets(prefix, list(group)) for (prefix, _), group in
                    itertools.groupby(runs, key=lambda run: (run[0], run[1] == "")))


def _expand_name(name: str, nodelist: str) -> Iterator[str]:
    """All combinations of the brackets of one name, the last bracket varying fastest."""
    pieces = re.split(r"\[([^\]]*)\]", name)
    choices = [_numbers(piece, nodelist) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _numbers(ranges: str, nodelist: str) -> list[str]:
    """``08-10,12`` as 08, 09, 10, 12; the width is the lower bound's."""
    numbers: list[str] = []
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not (high.isdigit() and int(low) <= int(high))):
            raise _malformed(nodelist)
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
    return numbers


def _successor(low: str, high: str) -> str | None:
    """The number after ``high`` in a range that begins with ``low`` and has its width."""
    return f"{int(high) + 1:0{len(low)}d}" if high else None


def _brackets(prefix: str, runs: list[tuple[str, str, str]]) -> str:
    ranges = [low if low == high else f"{low}-{high}" for _, low, high in runs]
    if ranges[0] and (len(ranges) > 1 or "-" in ranges[0]):
        return f"{prefix}[{','.join(ranges)}]"
    return ",".join(prefix + number for number in ranges)


def _malformed(nodelist: str) -> HpcMpError:
    return HpcMpError(f"host list {nodelist!r}", "is not in Slurm's bracket form", "write for example n[1-4,7],login")
