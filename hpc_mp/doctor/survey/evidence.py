"""The evidence of a survey so far: plain facts, from which ``diagnose`` draws conclusions. Each agent reports the facts of its
own node: before any measurement, and its compute speed, by the exact problem of ``doctor.compute``, repeated on one CPU."""

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import psutil

from hpc_mp.base.grouping import grouped
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.doctor.compute.device import cpu_name
from hpc_mp.doctor.compute.problem import exact, whole
from hpc_mp.doctor.survey.node_report import NodeReport
from hpc_mp.doctor.survey.transfer import Probed
from hpc_mp.environment.detect import platform, read_machine

ERRORS = ("errin", "errout", "dropin", "dropout")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that carries the data of one rail."""

    name: str
    address: str
    mtu: int  # largest packet in bytes
    speed: int  # link speed in Mbit/s, 0 if the driver does not report it


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as its agent sees it."""

    node: str
    interfaces: tuple[Interface, ...]
    model: str  # of the CPU
    cpus: int
    port: int  # of the agent, for TCP and UDP
    platform: str | None = None  # the environment profile that matches the machine; None if none does


def node_facts(node: str, requested: Sequence[str], port: int) -> NodeFacts:
    """Return the facts of this node. ``requested``: interfaces to measure, one per rail; empty: the interface of the node's name.
    Raises LookupError if a requested interface does not exist or has no IPv4 address."""
    machine = read_machine(NodeSource())
    return NodeFacts(node, _interfaces(node, requested, machine.route), cpu_name(), len(os.sched_getaffinity(0)), port,
                     platform(machine).name)


def counters(names: Sequence[str]) -> dict[str, int]:
    """Return errors and drops of the interfaces since the node started, by names such as ``eth0.errin``."""
    totals = psutil.net_io_counters(pernic=True)
    return {f"{name}.{error}": getattr(totals[name], error) for name in names if name in totals for error in ERRORS}


def _interfaces(node: str, requested: Sequence[str], route: str | None) -> tuple[Interface, ...]:
    addresses = {name: [entry.address for entry in kinds if entry.family == socket.AF_INET]
                 for name, kinds in psutil.net_if_addrs().items()}
    usable = {name: ipv4[0] for name, ipv4 in addresses.items() if ipv4}
    names = list(requested) or [_own(node, usable, route)]
    for name in names:
        if name not in usable:
            raise LookupError(f"no interface {name} with an IPv4 address; there are {', '.join(sorted(usable)) or 'none'}")
    state = psutil.net_if_stats()
    return tuple(Interface(name, usable[name], state[name].mtu, state[name].speed) for name in names)


def _own(node: str, usable: dict[str, str], route: str | None) -> str:
    """Return the interface of the node's name, else of the default route, else the first that is not the loopback."""
    try:
        named = socket.gethostbyname_ex(node)[2]
    except OSError:
        named = []
    others = [name for name in usable if name != "lo"]
    return min(others, key=lambda name: (usable[name] not in named, name != route), default="lo")


SIZE = 256  # rows and columns of one piece of work: some milliseconds
WINDOW_S = 0.3
"""Three times the period in which a cgroup gives and withholds CPU time: a window holds at most 4/3 of what it gives."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of one trial."""

    rate: float  # pieces of work per second of wall time, in the best window, which other programs disturb least
    share: float  # CPU time per wall time over all windows
    digest: str  # digest of the work, the same on every node; "" if two pieces on one node differ
    idle: float  # number of allowed processors that were idle meanwhile: a limit withheld them, not other programs


def compute(seconds: float) -> Computed:
    """Compute for some seconds and return the result."""
    left, right = exact(SIZE)
    begin, used, idle = time.monotonic(), time.thread_time(), _idle()
    digests: set[str] = set()
    best = 0.0
    while (start := time.monotonic()) - begin < seconds:
        count = 0
        while time.monotonic() - start < WINDOW_S:
            digests.add(whole(np.einsum("ij,jk->ik", left, right, optimize=False)))  # one thread, no library
            count += 1
        best = max(best, count / (time.monotonic() - start))
    share = (time.thread_time() - used) / (time.monotonic() - begin)
    return Computed(best, share, digests.pop() if len(digests) == 1 else "", (_idle() - idle) / (time.monotonic() - begin))


def _idle() -> float:
    """Return the idle seconds since boot, summed over the processors that this process may use."""
    times = psutil.cpu_times(percpu=True)
    return sum(times[cpu].idle for cpu in os.sched_getaffinity(0) if cpu < len(times))


Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Leg:
    """One direction of one transfer on one rail."""

    sender: int
    receiver: int
    rail: int
    rate: float | None  # GB/s; None if nothing arrived
    segments: int = 0  # data segments sent
    lost: int = 0  # segments of these, retransmitted because they were lost
    paced: bool = False  # True if sent at a low rate, at which no queue overflows
    why: str = ""  # reason if there is no rate

    @property
    def pair(self) -> Pair:
        return min(self.sender, self.receiver), max(self.sender, self.receiver)


@dataclass(frozen=True, slots=True)
class Echo:
    """The result of the probe packets from one node to another on one rail."""

    sender: int
    receiver: int
    rail: int
    counts: Probed


class Absence(NamedTuple):
    """The reason why a node has no agent that can measure, and the code of the resulting diagnosis."""

    code: str
    why: str


@dataclass(slots=True)
class SurveyEvidence:
    """The evidence on the nodes with an agent; a node is its index in ``nodes``."""

    nodes: tuple[str, ...]  # names, in the order of the agents
    facts: tuple[NodeFacts, ...]
    absent: Mapping[str, Absence] = field(default_factory=dict)  # requested nodes without an agent, by name
    leaves: Mapping[str, str] = field(default_factory=dict)  # leaf switch by node name, as far as known
    reports: dict[int, NodeReport] = field(default_factory=dict)  # the nodes' own reports, by node
    legs: list[Leg] = field(default_factory=list)
    echoes: list[Echo] = field(default_factory=list)
    # results of nodes that computed at the same time, one entry per trial
    trials: list[Mapping[int, Computed]] = field(default_factory=list)
    # errors and drops of the interfaces during the survey, by node and counter
    counters: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def rails(self) -> int:
        """The number of rails that every node has."""
        return min(len(facts.interfaces) for facts in self.facts)


def by_pair(legs: Iterable[Leg]) -> dict[Pair, list[Leg]]:
    """Return the transfers of every pair."""
    return grouped((leg.pair, leg) for leg in legs)
