"""Facts that an agent reports about its own node before any measurement."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.doctor.compute.device import cpu_name
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
