"""Events that ranks print while they measure, and their extraction from other output.

    {"event": "meet", "node", "port"}          rank 0 listens there, and waits for the launcher to send the address
    {"event": "ranks", "ranks", "versions"}    all ranks have met: {"rank", "group", "pid", "host", "device", "name"} of each
    {"event": "size", "size"}                  this size begins
    {"event": "row", "size", "ranks"}          mean seconds, wrong elements, seconds of each iteration, by rank and placement
    {"event": "end"}                           all sizes are done
    {"event": "refused", "value", "rule", "remedy"}    a rank found the input wrong
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

MARK = "hpc-mp-bench "
# "1": the launcher writes the rendezvous address to standard input (srun passes it to all ranks)
THROUGH_LAUNCHER = "HPC_MP_BENCH_THROUGH_LAUNCHER"
Event = dict[str, Any]


def events(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events in complete lines; other lines are skipped."""
    for line in lines:
        _, mark, text = line.partition(MARK)
        if mark:
            yield json.loads(text)


class Voice:
    """The writer of events. It takes over standard output; libraries' output there goes to standard error from then on."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.dup(1)
        os.dup2(2, 1)

    def say(self, event: str, **facts: Any) -> None:
        data = f"{MARK}{json.dumps({'event': event} | facts, separators=(',', ':'))}\n".encode()
        while data:
            data = data[os.write(self._out, data):]
