"""Facts that an agent reports about its own node: before any measurement, and its compute speed, by the exact problem of
``doctor.compute``, repeated on one CPU."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.doctor.compute.device import cpu_name
from hpc_mp.doctor.compute.problem import exact, whole
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
