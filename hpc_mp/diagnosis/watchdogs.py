"""What NCCL's watchdog in torch says of a collective that did not end, and whose absence from it the others waited for.

Each rank that waits longer than its process group allows writes the line and aborts; the first that does ends the others, who
may not have come to say it. Form of the line: ProcessGroupNCCL.cpp, torch 2.0 to 2.13.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_mp.diagnosis.stacks import numbers

LINE = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+).*?Timeout\(ms\)=(\d+)")
THROWN = re.compile(r"terminate called (?:after throwing|recursively)")
WHAT = re.compile(r"\s*what\(\):\s*(.*)$")
# Why native code ends a process, where no exception says it: the line "F" is the last of glog, Abseil, TensorFlow and torch.
REASONS = (LINE, re.compile(r"watchdog thread terminated with exception: .+"),
           re.compile(r"^(?:\[rank\d+\]: ?\[)?(?:[-\d]+ [\d:.]+: )?F\d* (?:[\d:.]+ +)?(?:\d+ +)?\S+:\d+\] +\S.*"))


@dataclass(frozen=True, slots=True)
class CollectiveTimeout:
    """Attributes:
    waited: the ranks whose watchdogs spoke.
    apart: the one for which they waited; None where nobody can tell.
    text: what they waited in, and for how long.
    """

    waited: tuple[int, ...]
    apart: int | None
    text: str

    def __str__(self) -> str:
        return f"{numbers(self.waited)} waited {'for it ' if self.apart is not None else ''}{self.text}, says NCCL's watchdog"


def collective_timeout(lines: Mapping[int, Sequence[str]], ranks: int) -> CollectiveTimeout | None:
    """What the watchdogs of all ranks together say; None where none has spoken.

    Args:
        lines: the last ones of every rank's log.
        ranks: how many there are.
    """
    said = {rank: match for rank, own in sorted(lines.items())
            if (match := next(filter(None, map(LINE.search, own)), None)) is not None}
    if not said:
        return None
    waits = {rank: (match[1], match[2]) for rank, match in said.items()}
    counts = Counter(waits.values())
    most, count = counts.most_common(1)[0]
    silent = [rank for rank in range(ranks) if rank not in waits]
    others = [rank for rank, where in waits.items() if where != most]
    named = silent[0] if len(silent) == 1 else others[0] if not silent and len(others) == 1 and count > 1 else None
    seconds = int(said[next(rank for rank in waits if waits[rank] == most)][3]) / 1000
    elsewhere = f", it in {waits[named][1]} ({waits[named][0]})" if named in waits else ""
    waited = tuple(rank for rank in waits if rank != named)
    places = ", ".join(f"{operation} ({number})" for number, operation in dict.fromkeys(waits[rank] for rank in waited))
    return CollectiveTimeout(waited, named, f"{seconds:g} s in {places}{elsewhere}")


def thrown(lines: Sequence[str]) -> str:
    """Why native code has aborted: what the C++ exception says, or the library; empty where nothing is known."""
    begin = next((number for number in reversed(range(len(lines))) if THROWN.search(lines[number])), None)
    if begin is None:
        return given_reason(lines)
    return next((match[1] for match in map(WHAT.match, lines[begin + 1:begin + 6]) if match), "")


def given_reason(lines: Sequence[str]) -> str:
    """The reason for which a native library says that it ends the process; empty where none does."""
    return next((found[0] for words in REASONS for found in map(words.search, reversed(lines)) if found), "")
