"""The host: its processors and their clock source; its main memory: size, NUMA nodes, settings, and the part that processes
share; its name, its clock, and its firewalls."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.catalogue import MachineType
from hpc_mp.cluster.node.gpu_pci import read_machine_type
from hpc_mp.cluster.node.mounts import Room, room
from hpc_mp.cluster.node.source import NodeSource, Readings, Unavailable, fields, maybe, members

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


_SIZE = re.compile(r"(\w+(?:\(\w+\))?):\s+(\d+)( kB)?")
SHM, MEMINFO = "/dev/shm", "/proc/meminfo"


@dataclass(frozen=True)
class HostMemory:
    """The main memory of a machine."""

    of: Mapping[str, int]  # ``/proc/meminfo``, in bytes; ``HugePages_…`` are counts
    settings: Mapping[str, int]  # the kernel's ``zone_reclaim_mode`` and ``numa_balancing``, if they exist
    nodes: Mapping[int, int]  # bytes of every NUMA node that has processors
    kind: MachineType | None
    gpus: bool  # True if GPUs are here


@dataclass(frozen=True)
class SharedMemory:
    """``/dev/shm``. ``left``: names in it of the kind that NCCL, torch and MPI create; ``room`` of its file system."""

    room: Room
    left: tuple[str, ...]
    memory: int


def read_memory(source: NodeSource) -> HostMemory:
    """Read the main memory. Raises Unavailable."""
    settings = {name: maybe(source.number, f"/proc/sys/{folder}/{name}")
                for folder, name in (("vm", "zone_reclaim_mode"), ("kernel", "numa_balancing"))}
    nodes = {}
    for path in source.names("/sys/devices/system/node/node[0-9]*"):
        size = re.search(r"MemTotal:\s+(\d+) kB", maybe(source.text, f"{path}/meminfo") or "")
        if size and maybe(source.text, f"{path}/cpulist"):
            nodes[int(path.rpartition("node")[2])] = int(size[1]) << 10
    return HostMemory(
        of=read_meminfo(source),
        settings={name: value for name, value in settings.items() if value is not None},
        nodes=nodes,
        kind=read_machine_type(source),
        gpus=bool(source.names("/proc/driver/nvidia/gpus/*") or source.names("/sys/class/kfd/kfd/topology/nodes/*")),
    )


def read_shared(source: NodeSource) -> SharedMemory:
    """Read ``/dev/shm``. Raises Unavailable."""
    left = tuple(name for pattern in ("nccl-*", "torch_*", "vader_segment*", "psm2_shm*", "ucx_shm*", "sm_segment*", "mpich_shm*")
                 for name in source.names(f"{SHM}/{pattern}"))
    if not source.path(SHM).is_dir():
        raise Unavailable(f"{SHM}: does not exist")
    return SharedMemory(room(source, SHM), left, read_meminfo(source)["MemTotal"])


def read_meminfo(source: NodeSource) -> Mapping[str, int]:
    """Return the lines of ``/proc/meminfo`` in bytes; ``HugePages_…`` are counts. Raises Unavailable."""
    lines = _SIZE.findall(source.text(MEMINFO))
    return Readings(MEMINFO, {name: int(number) << 10 if unit else int(number) for name, number, unit in lines})


@dataclass(frozen=True)
class HostName:
    """The host's name and its resolution."""

    name: str  # the kernel's host name
    addresses: tuple[str, ...]  # addresses that the name service gives for it
    # the first address that is not a loopback, and the names it resolves back to; None if no such address exists
    back: tuple[str, tuple[str, ...]] | None


@dataclass(frozen=True)
class Clock:
    """``by``: the program that keeps it; ``synchronized``: True if it follows a source; ``offset``: seconds; None if unknown."""

    by: str
    synchronized: bool
    offset: float | None


@dataclass(frozen=True)
class Firewall:
    """``active``: firewalls that are on; ``closed``: chains that reject arriving packets, Unavailable without root."""

    active: tuple[str, ...]
    closed: tuple[str, ...] | Unavailable


def read_name(source: NodeSource) -> HostName:
    """Read the host's name. Raises Unavailable if the name service cannot be queried."""
    name = source.text("/proc/sys/kernel/hostname")
    addresses = _lookup(source, ("getent", "ahosts", name))
    outer = next((address for address in addresses if not is_loopback(address) and not address.startswith("fe80:")), None)
    if outer is None:
        return HostName(name, addresses, None)
    return HostName(name, addresses, (outer, _lookup(source, ("getent", "hosts", outer), first=1)))


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def read_clock(source: NodeSource) -> Clock:
    """Read the clock's state. Raises Unavailable if no time daemon reports it."""
    failures = []
    try:
        values = source.answer(("chronyc", "-c", "tracking")).strip().split(",")
        return Clock("chrony", values[0] not in ("", "00000000", "7F7F0101"), abs(float(values[4])))
    except (Unavailable, IndexError, ValueError) as error:
        failures.append(str(error))
    if source.names("/run/systemd/timesync/synchronized"):
        return Clock("systemd-timesyncd", True, None)
    try:
        settings = fields(source.answer(("timedatectl", "show")), "=")
        return Clock("timedatectl", settings.get("NTPSynchronized") == "yes", None)
    except Unavailable as unseen:
        failures.append(str(unseen))
    raise Unavailable("no time synchronisation program answers: " + "; ".join(failures))


def read_firewall(source: NodeSource) -> Firewall:
    active = []
    if fields(maybe(source.text, "/etc/ufw/ufw.conf") or "", "=").get("ENABLED") == "yes":
        active.append("ufw")
    if any(maybe(source.text, path) == "firewalld" for path in source.names("/proc/[0-9]*/comm")):
        active.append("firewalld")
    closed: tuple[str, ...] | Unavailable
    try:
        closed = tuple(f"{table} {chain}" for table, chain in _chains(source.answer(("nft", "list", "ruleset"))))
    except Unavailable as unseen:
        closed = unseen
    return Firewall(tuple(active), closed)


_COUNTED = r"(?:counter packets \d+ bytes \d+ |counter |log (?:prefix \"[^\"]*\" ?)?(?:level \w+ )?)*"
_REFUSES = re.compile(rf"{_COUNTED}(?:drop|reject\b.*|xt target \"(?:REJECT|DROP)\".*)")  # everything
_SENDERS = r"(?P<few>ip6? saddr (?:\{[^}]*\}|\S+) |iif(?:name)? (?:\{[^}]*\}|(?!\"?lo\b)\S+) )?"  # all, a network or an interface
_FOLLOWS = re.compile(rf"{_SENDERS}{_COUNTED}(?:jump|goto) (\S+)")
_LETS_IN = re.compile(rf"{_SENDERS}{_COUNTED}accept")


def _chains(ruleset: str) -> list[tuple[str, str]]:
    """Return (table, chain) of chains for arriving packets that reject everything not allowed and allow no network as a whole."""
    rules: dict[tuple[str, str], list[str]] = {}
    table, chain = "", ""
    for line in map(str.strip, ruleset.splitlines()):
        words = line.split()
        if words[:1] == ["table"]:
            table = " ".join(words[1:-1])
        elif words[:1] == ["chain"]:
            chain = words[1]
        else:
            rules.setdefault((table, chain), []).append(re.sub(r" comment \".*\"$", "", line))

    def lets_in(place: tuple[str, str], depth: int = 8) -> bool | None:
        """Return True if a whole network may pass, False if the rest is turned away, None if the chain leaves that open."""
        for rule in rules.get(place, ()) if depth else ():
            if _LETS_IN.fullmatch(rule) or _REFUSES.fullmatch(rule):
                return bool(_LETS_IN.fullmatch(rule))
            onward = _FOLLOWS.fullmatch(rule)
            inner = lets_in((place[0], onward[2]), depth - 1) if onward else None
            if onward and (inner or (inner is False and not onward["few"])):
                return inner
        return False if any(re.search(r"hook input .*policy drop", rule) for rule in rules.get(place, ())) else None

    return [place for place, lines in rules.items() if any("hook input " in line for line in lines) and lets_in(place) is False]


def _lookup(source: NodeSource, argv: tuple[str, ...], first: int = 0) -> tuple[str, ...]:
    """Return the words of each line from ``first`` on: one address of ``ahosts``, all names of ``hosts``; none if unknown."""
    try:
        lines = [line.split() for line in source.answer(argv).splitlines()]
    except Unavailable as unseen:
        if unseen.code == 2:  # getent's exit code for an unknown entry
            return ()
        raise
    return tuple(dict.fromkeys(word for line in lines for word in (line[first:] if first else line[:1])))
