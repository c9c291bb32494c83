"""Processors and their clock source."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.catalogue import MachineType
from hpc_mp.cluster.node.gpu_pci import read_machine_type
from hpc_mp.cluster.node.source import NodeSource, maybe, members

_BASE = "/sys/devices/system/cpu"
_CLOCK = "/sys/devices/system/clocksource/clocksource0"


@dataclass(frozen=True)
class Cpus:
    """The processors of a machine."""

    # online, offline: logical processors
    online: int
    offline: tuple[int, ...]
    sockets: int | None  # packages; None if the kernel does not number them
    nodes: int  # NUMA nodes that have processors
    governors: Mapping[str, int]  # name to number of processors; empty if the machine cannot set frequencies
    # clock, clocks: the clock source in use, and the available ones
    clock: str | None
    clocks: tuple[str, ...]
    kind: MachineType | None


def read_cpus(source: NodeSource) -> Cpus:
    """Read the processors. Raises Unavailable."""
    online = members(source.text(f"{_BASE}/online"))
    packages = {maybe(source.number, f"{_BASE}/cpu{cpu}/topology/physical_package_id") for cpu in online} - {None, -1}
    governors = (maybe(source.text, f"{_BASE}/cpu{cpu}/cpufreq/scaling_governor") for cpu in online)
    return Cpus(
        online=len(online),
        offline=members(maybe(source.text, f"{_BASE}/offline") or ""),
        sockets=len(packages) or None,
        nodes=sum(bool(maybe(source.text, f"{path}/cpulist")) for path in source.names("/sys/devices/system/node/node[0-9]*")),
        governors=Counter(filter(None, governors)),
        clock=maybe(source.text, f"{_CLOCK}/current_clocksource"),
        clocks=tuple((maybe(source.text, f"{_CLOCK}/available_clocksource") or "").split()),
        kind=read_machine_type(source),
    )
