"""Slurm's bracket form of host lists, ``n[1-4,7]``, read and written in order.

The order is kept because Slurm's own lists are not always sorted (with ``TopologyParam=SwitchAsNodeRank`` they follow the
switches) and a node's position in the list is its ``SLURM_NODEID``. Libraries for host lists sort, or are GPL.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from math import prod

from hpc_mp.base.errors import HpcMpError

MOST_HOSTS = 2**16  # Slurm's own limit on nodes, and on the hosts of a range
MOST_DIGITS = 18  # of a number: the limit of 64 bits, as in Slurm
SHOWN = 200  # characters of a malformed list that the message repeats
_NAME = r"(?:[^\[\],\s]|\[[0-9,-]+\])+"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_Run = tuple[range, int]  # numbers, and the least digits of each


def expand(nodelist: str) -> tuple[str, ...]:
    """Return the host names of a list, as ``scontrol show hostnames`` prints them: ``n[08-10],x`` is n08, n09, n10, x. Raises
    HpcMpError if the text is not a host list, or has more hosts than Slurm allows (65,536)."""
    if nodelist and not re.fullmatch(f"{_NAME}(,{_NAME})*", nodelist):
        raise _malformed(nodelist)
    names = [_parse(name, nodelist) for name in re.findall(_NAME, nodelist)]
    if (count := sum(prod(sum(len(run) for run, _ in bracket) for bracket in brackets) for _, brackets in names)) > MOST_HOSTS:
        raise HpcMpError(f"host list {_short(nodelist)}", f"names {count} hosts, but Slurm allows at most {MOST_HOSTS}",
                         "shorten the ranges")
    return tuple(host for texts, brackets in names for host in _combine(texts, brackets))


def expanded(nodelist: str) -> tuple[str, ...]:
    """Return the names in a list of hosts or files; the text itself if it is not a list."""
    try:
        return expand(nodelist)
    except HpcMpError:
        return (nodelist,)


def compress(hosts: Iterable[str]) -> str:
    """Return a list that expands to ``hosts`` in the same order, as ``scontrol show hostlist`` prints it."""
    runs: list[tuple[str, str, str]] = []  # prefix, first and last number of consecutive names
    for host in hosts:
        prefix = host.rstrip("0123456789")
        number = host[len(prefix):]
        if number and runs and runs[-1][0] == prefix and number == _successor(*runs[-1][1:]):
            runs[-1] = (prefix, runs[-1][1], number)
        else:
            runs.append((prefix, number, number))
    return ",".join(_brackets(prefix, list(group)) for (prefix, _), group in
                    itertools.groupby(runs, key=lambda run: (run[0], run[1] == "")))


def _parse(name: str, nodelist: str) -> tuple[list[str], list[list[_Run]]]:
    """Return the texts around the brackets of one name, and the contents of the brackets."""
    pieces = re.split(r"\[([^\]]*)\]", name)
    return pieces[::2], [[_run(part, nodelist) for part in bracket.split(",")] for bracket in pieces[1::2]]


def _run(text: str, nodelist: str) -> _Run:
    """Parse ``08-10`` or ``08``; the width is the lower bound's."""
    match = _RANGE.fullmatch(text)
    if match is None or max(map(len, text.split("-"))) > MOST_DIGITS:
        raise _malformed(nodelist)
    run = range(int(match[1]), int(match[2] or match[1]) + 1)
    if not run:
        raise _malformed(nodelist)
    return run, len(match[1])


def _combine(texts: list[str], brackets: list[list[_Run]]) -> Iterator[str]:
    """Yield all combinations in Slurm's order: the last bracket varies fastest, then the first, the second and so on."""
    numbers = [[f"{number:0{width}d}" for run, width in bracket for number in run] for bracket in brackets]
    for turn in itertools.product(*reversed(numbers[:-1]), *numbers[-1:]):
        chosen = [*reversed(turn[:-1]), *turn[-1:], ""]
        yield "".join(map("".join, zip(texts, chosen, strict=True)))


def _successor(low: str, high: str) -> str | None:
    """Return the number after ``high`` in a range that begins with ``low`` and has its width; None beyond 64 bits."""
    return f"{int(high) + 1:0{len(low)}d}" if 0 < len(high) <= MOST_DIGITS else None


def _brackets(prefix: str, runs: list[tuple[str, str, str]]) -> str:
    ranges = [low if low == high else f"{low}-{high}" for _, low, high in runs]
    if ranges[0] and (len(ranges) > 1 or "-" in ranges[0]):
        return f"{prefix}[{','.join(ranges)}]"
    return ",".join(prefix + number for number in ranges)


def _malformed(nodelist: str) -> HpcMpError:
    return HpcMpError(f"host list {_short(nodelist)}", "must be in Slurm's bracket form", "write for example n[1-4,7],login")


def _short(nodelist: str) -> str:
    return repr(nodelist if len(nodelist) <= SHOWN else nodelist[:SHOWN] + "…")
