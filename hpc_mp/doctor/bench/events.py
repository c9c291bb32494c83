"""What ranks say while they measure, and how it is found among what else they print.

    {"event": "meet", "node", "port"}          rank 0 listens there, and waits to be told where that is
    {"event": "ranks", "ranks", "versions"}    all have met: {"rank", "group", "pid", "host", "device", "name"} of each
    {"event": "size", "size"}                  this size begins
    {"event": "row", "size", "ranks"}          of each rank and placement: mean seconds, wrong elements, seconds of each iteration
    {"event": "end"}                           all sizes are done
    {"event": "refused", "value", "rule", "remedy"}    the input is wrong, says a rank
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

MARK = "hpc-mp-bench "
# "1": the launcher says on standard input where ranks meet (srun gives it to all of them)
THROUGH_LAUNCHER = "HPC_MP_BENCH_THROUGH_LAUNCHER"
Event = dict[str, Any]


def events(lines: Iterable[str]) -> Iterator[Event]:
    """Of complete lines; all others are passed over."""
    for line in lines:
        _, mark, text = line.partition(MARK)
        if mark:
            yield json.loads(text)


class Voice:
    """Takes standard output for itself; what libraries print there goes to standard error from now on."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.dup(1)
        os.dup2(2, 1)

    def say(self, event: str, **facts: Any) -> None:
        data = f"{MARK}{json.dumps({'event': event} | facts, separators=(',', ':'))}\n".encode()
        while data:
            data = data[os.write(self._out, data):]
