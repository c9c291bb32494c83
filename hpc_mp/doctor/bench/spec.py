"""Specification of one run of ``hpc-mp bench``, written by the control half and read by every rank; and the ranks' events.

Events are lines among other output of the ranks:

    {"event": "meet", "node", "port"}          rank 0 listens there, and waits for the launcher to send the address
    {"event": "ranks", "ranks", "versions"}    all ranks have met: {"rank", "group", "pid", "host", "device", "name"} of each
    {"event": "size", "size"}                  this size begins
    {"event": "row", "size", "ranks"}          mean seconds, wrong elements, seconds of each iteration, by rank and placement
    {"event": "end"}                           all sizes are done
    {"event": "refused", "value", "rule", "remedy"}    a rank found the input wrong
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpc_mp.base.errors import HpcMpError
from hpc_mp.planner.collectives import COLLECTIVES, collective

Backend = Literal["nccl", "gloo"]
ELEMENT: dict[str, int] = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int32": 4}
"""Bytes of an element, by nccl-tests' names of types."""


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """The specification of one run."""

    collective: str
    backend: Backend
    nodes: int
    ranks_per_node: int
    groups: tuple[tuple[int, ...], ...]  # groups of ranks that exchange data, all at the same time
    sizes: tuple[int, ...]  # bytes of the whole array, ascending
    dtype: str = "float"
    warmup: int = 5  # untimed operations for each size and placement
    iterations: int = 20  # timed ones
    check: bool = True
    timeout: float = 300.0  # seconds that ranks wait for each other

    def __post_init__(self) -> None:
        collective(self.collective)
        if self.dtype not in ELEMENT:
            raise HpcMpError(f"--datatype {self.dtype}", f"must be {', '.join(ELEMENT)}", "name one of them")
        if self.iterations < 1 or self.warmup < 0:
            raise HpcMpError(f"-n {self.iterations} -w {self.warmup}", "must be at least 1 and 0", "set -n 20 -w 5")
        if sorted(rank for group in self.groups for rank in group) != list(range(self.world)):
            raise HpcMpError(f"{len(self.groups)} groups", f"do not hold each of {self.world} ranks once", "split them again")
        if self.collective == "sendrecv" and min(map(len, self.groups)) < 2:
            raise HpcMpError("sendrecv", "needs another rank in every group", "use at least 2 ranks, or another split")

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    def group_of(self, rank: int) -> int:
        """Return the index of the group that contains ``rank``."""
        return next(index for index, group in enumerate(self.groups) if rank in group)

    def fitting(self, size: int) -> bool:
        """Return True if every group has data to send at this size."""
        operation, element = COLLECTIVES[self.collective], ELEMENT[self.dtype]
        return all(operation.counts(size, len(group), element).param for group in self.groups)


def dump_spec(spec: BenchSpec) -> str:
    """Return the specification as one line of JSON."""
    return json.dumps(asdict(spec), separators=(",", ":"))


def load_spec(text: str) -> BenchSpec:
    """Parse the output of ``dump_spec``."""
    tree = json.loads(text)
    return BenchSpec(**tree | {"groups": tuple(map(tuple, tree["groups"])), "sizes": tuple(tree["sizes"])})


def nodes_of(group: tuple[int, ...], ranks_per_node: int) -> int:
    """Return the number of nodes of a group if ranks fill node after node."""
    return len({rank // ranks_per_node for rank in group})


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse ``8``, ``32K``, ``1.5M``, ``8G`` (powers of 1,024) into bytes. Raises HpcMpError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise HpcMpError(f"size {text!r}", "is no number of bytes with K, M or G behind it", "write for example 8, 32K or 1G")
    return int(float(match[1]) * UNITS[match[2].upper()])


def sweep(begin: int, end: int, factor: int, step: int | None = None) -> tuple[int, ...]:
    """Return sizes from ``begin`` to at most ``end`` bytes, each ``factor`` times the previous one or ``step`` bytes more. Raises
    HpcMpError for invalid bounds, factor or step."""
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
