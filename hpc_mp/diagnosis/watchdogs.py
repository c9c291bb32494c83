"""Collective timeouts reported by NCCL's watchdog in torch, and the rank that the others waited for.

Each rank that waits longer than its process group's timeout writes the line and aborts. The first rank to abort ends the
others, perhaps before they have written the line. Form of the line: ProcessGroupNCCL.cpp, torch 2.0 to 2.13.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_mp.diagnosis.stacks import numbers

LINE = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+).*?Timeout\(ms\)=(\d+)")
THROWN = re.compile(r"terminate called (?:after throwing|recursively)")
WHAT = re.compile(r"\s*what\(\):\s*(.*)$")
# The reason of native code for ending a process without an exception. A line with "F" is the last line of glog, Abseil,
# TensorFlow and torch.
REASONS = (LINE, re.compile(r"watchdog thread terminated with exception: .+"),
           re.compile(r"(?:(?:Transport|RNR) retry count exceeded|(?:Local|Remote) [\w ]+ error) on \w+:\d.*|"
                      r"\buc[pst]_\w+\([^)]*\) failed: .*"),  # of UCX, before a backtrace or MPI's own words
           re.compile(r"forrtl: (?!severe|error).*"),
           re.compile(r"(?:forrtl: |Operating system error: |Error allocating \d+ bytes).*"),  # before a table of images
           re.compile(r"Error polling for event status: .+"),  # of TensorFlow, before a last line without a reason
           re.compile(r"^(?:\[rank\d+\]: ?\[)?(?:[-\d]+ [\d:.]+: )?F\d* (?:[\d:.]+ +)?(?:\d+ +)?\S+:\d+\] +\S.*"))


@dataclass(frozen=True, slots=True)
class CollectiveTimeout:
    """A collective that timed out. ``waited``: the ranks whose watchdogs reported."""

    waited: tuple[int, ...]
    apart: int | None
    text: str

    def __str__(self) -> str:
        return f"{numbers(self.waited)} waited {'for it ' if self.apart is not None else ''}{self.text} (NCCL's watchdog)"


def collective_timeout(lines: Mapping[int, Sequence[str]], ranks: int) -> CollectiveTimeout | None:
    """Return the common finding of all ranks' watchdogs; None without a report. ``lines``: last lines of every rank's log.
    ``ranks``: number of ranks."""
    matches = {rank: match for rank, log in sorted(lines.items())
               if (match := next(filter(None, map(LINE.search, log)), None)) is not None}
    if not matches:
        return None
    waits = {rank: (match[1], match[2]) for rank, match in matches.items()}
    counts = Counter(waits.values())
    commonest, count = counts.most_common(1)[0]
    silent = [rank for rank in range(ranks) if rank not in waits]
    others = [rank for rank, where in waits.items() if where != commonest]
    named = silent[0] if len(silent) == 1 else others[0] if not silent and len(others) == 1 and count > 1 else None
    seconds = int(matches[next(rank for rank in waits if waits[rank] == commonest)][3]) / 1000
    elsewhere = f", while it was in {waits[named][1]} ({waits[named][0]})" if named in waits else ""
    waited = tuple(rank for rank in waits if rank != named)
    places = ", ".join(f"{operation} ({number})" for number, operation in dict.fromkeys(waits[rank] for rank in waited))
    return CollectiveTimeout(waited, named, f"{seconds:g} s in {places}{elsewhere}")


def thrown(lines: Sequence[str]) -> str:
    """Return the reason for which native code aborted: the message of the C++ exception or of the library; "" if unknown."""
    begins = [number for number in reversed(range(len(lines))) if THROWN.search(lines[number])]
    if not begins:
        return given_reason(lines)
    whats = (match[1] for begin in begins for match in map(WHAT.match, lines[begin + 1:begin + 6]) if match)
    return next(whats, "")


def given_reason(lines: Sequence[str]) -> str:
    """Return a native library's reason for ending the process; empty without one."""
    return next((match[0] for pattern in REASONS for match in map(pattern.search, reversed(lines)) if match), "")
