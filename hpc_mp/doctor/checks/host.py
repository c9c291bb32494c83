"""Checks of the host: its processors and processes, its memory, its name, clock, firewall and Ethernet."""

from collections import Counter
from collections.abc import Iterator

from hpc_mp.base.text import counted, duration, memory_size, several
from hpc_mp.cluster.node import host
from hpc_mp.cluster.node.netdev import ETHERNET, NetworkInterface, read_interfaces
from hpc_mp.cluster.node.processes import NodeProcess, Processes, read_processes
from hpc_mp.cluster.node.source import Unavailable
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well

_GOOD_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "timebase", "tod", "xen")
_GOOD_GOVERNORS = ("performance", "schedutil")


def count(cpus: host.Cpus) -> Iterator[Judgement]:
    if cpus.offline:
        yield Judgement("warning", f"{len(cpus.offline)} processors are switched off, {cpus.online} are on",
                        fix="echo 1 > /sys/devices/system/cpu/cpuN/online; nosmt at boot switches half of them off on purpose")
    if cpus.kind is None:
        if not cpus.offline:
            yield Judgement("ok", f"{cpus.online} processors in {cpus.sockets or 'unknown'} sockets")
        return
    kind = cpus.kind
    evidence = (f"{cpus.online} processors in {cpus.sockets or 'unknown'} sockets, {cpus.nodes} memory nodes; "
                f"a {kind.name} has {kind.vcpus} in {kind.sockets}, {kind.numa} memory nodes")
    good = cpus.online == kind.vcpus and cpus.sockets in (None, kind.sockets) and cpus.nodes == kind.numa
    if not (cpus.offline and cpus.online + len(cpus.offline) == kind.vcpus):
        yield Judgement("ok" if good else "error", evidence)


def governor(cpus: host.Cpus) -> Iterator[Judgement]:
    bad = (Judgement("warning", f"{name} on {many} of {cpus.online} processors")
           for name, many in cpus.governors.items() if name not in _GOOD_GOVERNORS)
    yield from or_well(bad, ", ".join(f"{name} on {many}" for name, many in cpus.governors.items()))


def clock(cpus: host.Cpus) -> Iterator[Judgement]:
    if cpus.clock is not None:
        good = cpus.clock in _GOOD_CLOCKS
        yield Judgement("ok" if good else "warning", f"{cpus.clock}; there are {', '.join(cpus.clocks)}")


CPU = checks_of(host.read_cpus, {"cpu-count": count, "cpu-governor": governor, "clocksource": clock})


_ZOMBIES = 20


def stuck(processes: Processes) -> Iterator[Judgement]:
    names = [f"{_named(process)} in {process.waits}" if process.waits else _named(process) for process in processes.stuck]
    yield Judgement("warning" if names else "ok",
                    f"{len(names)} processes wait in the kernel and do not come on: {several(names)}" if names
                    else f"none of {processes.count} processes")


def zombies(processes: Processes) -> Iterator[Judgement]:
    count = len(processes.zombies)
    yield Judgement("warning" if count > _ZOMBIES else "ok",
                    f"{count} dead processes that nobody waits for: {several([*map(_named, processes.zombies)])}".rstrip(": "))


def orphans(processes: Processes) -> Iterator[Judgement]:
    if processes.slurm:
        names = [f"{_named(process)} of user {process.user}, {duration(process.age)} old" for process in processes.orphans]
        yield Judgement("warning" if names else "ok",
                        f"{len(names)} processes of users whose parent has gone: {several(names)}" if names else "none")


def _named(process: NodeProcess) -> str:
    return f"{process.name} ({process.pid})"


PROCESSES = checks_of(read_processes, {"process-stuck": stuck, "process-zombies": zombies, "process-leftovers": orphans})


_SIZE_TOLERANCE = 0.95  # of the machine kind's memory; the firmware reserves some
_NODE_TOLERANCE = 0.9  # of the largest memory node
_SHM, _SHM_TINY = 1 << 30, 64 << 20  # the second is the default of containers
_FULL = 0.9


def installed(memory: host.HostMemory) -> Iterator[Judgement]:
    if memory.kind is not None and memory.kind.memory_seen_gib is not None:
        size, expected = memory.of["MemTotal"] / 2**30, memory.kind.memory_seen_gib
        yield Judgement("ok" if size >= _SIZE_TOLERANCE * expected else "error",
                        f"{memory_size(size * 2**30)}; a {memory.kind.name} has {memory_size(expected * 2**30)}")


def nodes(memory: host.HostMemory) -> Iterator[Judgement]:
    if len(memory.nodes) > 1:
        largest = max(memory.nodes.values())
        small = (Judgement("warning", f"{memory_size(size)}; the largest has {memory_size(largest)}", f"memory node {node}")
                 for node, size in memory.nodes.items() if size < _NODE_TOLERANCE * largest)
        yield from or_well(small, f"{len(memory.nodes)} memory nodes of {memory_size(largest)}")


def free(memory: host.HostMemory) -> Iterator[Judgement]:
    total, available = memory.of["MemTotal"], memory.of["MemAvailable"]
    yield Judgement("ok" if available >= 0.05 * total else "warning",
                    f"{memory_size(available)} of {memory_size(total)} can be had")


def swap(memory: host.HostMemory) -> Iterator[Judgement]:
    total = memory.of["SwapTotal"]
    used = total - memory.of["SwapFree"]
    bad = used > 0.1 * total and used > 1 << 30
    yield Judgement("warning" if bad else "ok", f"{memory_size(used)} of {memory_size(total)} are used" if total else "none")


def huge(memory: host.HostMemory) -> Iterator[Judgement]:
    total, idle = memory.of.get("HugePages_Total", 0), memory.of.get("HugePages_Free", 0)
    reserved = idle * memory.of.get("Hugepagesize", 0)
    bad = reserved > 0.1 * memory.of["MemTotal"]
    yield Judgement("warning" if bad else "ok",
                    f"{total} are set aside, {idle} of them unused ({memory_size(reserved)})" if total else "none are set aside")


def reclaim(memory: host.HostMemory) -> Iterator[Judgement]:
    if (mode := memory.settings.get("zone_reclaim_mode")) is not None:
        yield Judgement("warning" if mode else "ok", f"vm.zone_reclaim_mode = {mode}")


def balancing(memory: host.HostMemory) -> Iterator[Judgement]:
    on = memory.settings.get("numa_balancing")
    if on is not None:
        bad = on != 0 and memory.gpus and len(memory.nodes) > 1
        yield Judgement("warning" if bad else "ok", f"kernel.numa_balancing = {on}, {len(memory.nodes)} memory nodes")


def shared(shm: host.SharedMemory) -> Iterator[Judgement]:
    size, used = shm.room.size, shm.room.size - shm.room.free
    if size < _SHM:
        yield Judgement("error" if size <= _SHM_TINY else "warning",
                        f"{memory_size(size)}; NCCL and data workers share memory through it", host.SHM)
    elif used > _FULL * size:
        yield Judgement("warning", f"{memory_size(used)} of {memory_size(size)} are used", host.SHM,
                        "find out who left it (ls -l /dev/shm) and remove it")
    else:
        yield Judgement("ok", f"{memory_size(used)} of {memory_size(size)} are used", host.SHM)


def left(shm: host.SharedMemory) -> Iterator[Judgement]:
    used = shm.room.size - shm.room.free
    names = [name.rpartition("/")[2] for name in shm.left]
    bad = len(names) > 0 and used > 0.05 * shm.memory
    yield Judgement("warning" if bad else "ok",
                    f"{counted(len(names), 'file')} as NCCL, torch and MPI make them, {memory_size(used)} in all"
                    + (f": {several(names)}" if names else ""), host.SHM)


MEMORY = (
    *checks_of(host.read_memory, {
        "memory-size": installed,
        "memory-nodes": nodes,
        "memory-free": free,
        "memory-swap": swap,
        "memory-hugepages": huge,
        "memory-reclaim": reclaim,
        "numa-balancing": balancing,
    }),
    *checks_of(host.read_shared, {"shm-size": shared, "shm-leftovers": left}),
)


_SKEW_S = 0.1


def own_name(own: host.HostName) -> Iterator[Judgement]:
    shown = f"{own.name} is {several(list(own.addresses))}" if own.addresses else f"{own.name} has no address"
    outer = [address for address in own.addresses if not host.is_loopback(address)]
    first_is_loop = bool(own.addresses) and host.is_loopback(own.addresses[0])
    if outer and not first_is_loop:
        yield Judgement("ok", shown)
    else:
        yield Judgement("warning", f"{shown}: ranks that look up this host's name get "
                        + ("an address that no other host can reach" if own.addresses else "nothing"))


def there_and_back(own: host.HostName) -> Iterator[Judgement]:
    if own.back is None:
        return
    address, names = own.back
    short = {name.split(".")[0].lower() for name in names}
    good = own.name.split(".")[0].lower() in short
    shown = several(list(names)) if names else "no name"
    yield Judgement("ok" if good or not names else "warning", f"{own.name} is {address}, which is {shown}")


def kept(clock: host.Clock) -> Iterator[Judgement]:
    off = "" if clock.offset is None else f", {duration(abs(clock.offset))} off"
    if not clock.synchronized:
        yield Judgement("warning", f"{clock.by} follows no other clock{off}")
    else:
        bad = clock.offset is not None and clock.offset > _SKEW_S
        yield Judgement("warning" if bad else "ok", f"{clock.by} keeps it{off}")


def firewall(state: host.Firewall) -> Iterator[Judgement]:
    for name in state.active:
        yield Judgement("warning", "is on: ranks meet on ports from 10000 to 29999, and NCCL takes any port", name)
    if isinstance(state.closed, Unavailable):
        if not state.active:
            raise state.closed
        return
    for chain in state.closed:
        yield Judgement("warning", "turns away arriving packets that no rule allows", chain)
    if not state.active and not state.closed:
        yield Judgement("ok", "no firewall turns away what arrives")


def carrier(interfaces: tuple[NetworkInterface, ...]) -> Iterator[Judgement]:
    for link in interfaces:
        if link.kind != ETHERNET or not link.managed:
            continue
        down = link.state not in ("up", "unknown") and link.ups != 0  # 0: never had a link, so no cable
        half = link.duplex == "half"
        speed = "" if link.speed is None else f", {link.speed / 1000:g} Gb/s"
        yield Judgement("warning" if down or half else "ok",
                        f"{link.state}{speed}" + (", half duplex" if half else "") + ("; it had a link" if down else ""),
                        link.name)


def speed(interfaces: tuple[NetworkInterface, ...]) -> Iterator[Judgement]:
    """Check that interfaces of one driver have one speed, if there are at least three of them."""
    for driver in sorted({link.driver for link in interfaces if link.driver}):
        alike = [link for link in interfaces if link.driver == driver and link.kind == ETHERNET and link.speed]
        usual = Counter(link.speed or 0 for link in alike).most_common(1)
        for link in alike if len(alike) > 2 else ():
            slow = (link.speed or 0) < usual[0][0]
            yield Judgement("warning" if slow else "ok",
                            f"{(link.speed or 0) / 1000:g} Gb/s; {usual[0][1]} of {len(alike)} with driver {driver} have "
                            f"{usual[0][0] / 1000:g}", link.name)


def mtu(interfaces: tuple[NetworkInterface, ...]) -> Iterator[Judgement]:
    for driver in sorted({link.driver for link in interfaces if link.driver}):
        alike = [link for link in interfaces if link.driver == driver and link.managed and link.state == "up" and link.mtu]
        sizes = Counter((link.kind, link.mtu) for link in alike)
        for link in alike:
            usual = max((count, size or 0) for (kind, size), count in sizes.items() if kind == link.kind)[1]
            odd = link.mtu != usual or (link.mtu or 0) < 1280
            yield Judgement("warning" if odd else "ok",
                            f"MTU {link.mtu}" + (f"; others with driver {driver} have {usual}" if link.mtu != usual else ""),
                            link.name)


HOST = (
    *checks_of(host.read_name, {"dns-own-name": own_name, "dns-back": there_and_back}),
    *checks_of(host.read_clock, {"clock-sync": kept}),
    *checks_of(host.read_firewall, {"firewall": firewall}),
    *checks_of(read_interfaces, {"ethernet-link": carrier, "ethernet-speed": speed, "interface-mtu": mtu}),
)
