"""Limits of this process, and so of a program started here; its cgroup; and limits of the kernel that matter for a job of more
than a thousand ranks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.cluster.node.host import read_meminfo
from hpc_mp.cluster.node.netdev import read_interfaces
from hpc_mp.cluster.node.rdma import CLASS
from hpc_mp.cluster.node.source import NodeSource, Readings, Unavailable, fields, maybe, members

_LIMITS = "/proc/self/limits"
_LINE = re.compile(r"^Max (.+?)\s{2,}(\S+)\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Limit:
    """A limit; None is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class Limits:
    """Limits of this process."""

    of: Mapping[str, Limit]  # limits by the kernel's name: ``locked memory``, ``open files``, ``stack size``, ``processes``
    rdma: bool  # True if RDMA adapters are here, which need locked memory
    memory: int | None  # bytes of the machine's main memory; None if the kernel does not report it


def read_limits(source: NodeSource) -> Limits:
    """Read the limits. Raises Unavailable."""
    lines = _LINE.findall(source.text(_LIMITS))
    limits = Readings(_LIMITS, {name: Limit(_number(soft), _number(hard)) for name, soft, hard in lines})
    memory = maybe(read_meminfo, source) or {}
    return Limits(limits, bool(source.names(f"{CLASS}/*")), memory.get("MemTotal"))


def _number(text: str) -> int | None:
    return None if text == "unlimited" else int(text)


_ROOT = "/sys/fs/cgroup"
_ENDLESS = 1 << 60  # version 1 writes "no limit" as a number near 2^63
# Files of both versions: limit and use of memory; programs killed for memory, of version 2 without those of child groups, such as
# jobs; processors, the first that says any.
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", ("cpuset.effective_cpus", "cpuset.cpus")),
          2: ("memory.max", "memory.current", "memory.events.local", ("cpuset.cpus.effective",))}


@dataclass(frozen=True)
class Grant:
    """The tightest limits of the group and its ancestors. None is unlimited, or unknown."""

    # memory, used: bytes
    memory: int | None
    used: int | None
    killed: int | None  # processes of the group that were killed for memory
    cpus: int | None  # number of processors that it may run on
    share: float | None  # processors' worth of time (``cpu.max``)
    throttled: float | None  # share of the periods in which that time was used up
    tasks: int | None  # limit of processes and threads


@dataclass(frozen=True)
class Cgroup:
    """The cgroup of this process."""

    grant: Grant
    # ``cpus`` and ``memory`` (bytes) of this node that Slurm reports for the job; empty without a job
    requested: Mapping[str, int]
    allowed: int  # number of processors that this process may use
    online: int  # number of processors of the machine


def read_cgroup(source: NodeSource) -> Cgroup:
    """Read the cgroup. Raises Unavailable."""
    groups = {names: path for _, names, path in (line.split(":", 2) for line in source.text("/proc/self/cgroup").splitlines())}
    unified = source.names(f"{_ROOT}/cgroup.controllers")
    trees = {name: _upward(source, _ROOT, groups.get("", "/")) if unified else _tree(source, groups, name)
             for name in ("memory", "pids", "cpu", "cpuset")}
    grant = _grant(source, 2 if unified else 1, trees)
    environ = dict(word.partition("=")[::2] for word in (maybe(source.text, "/proc/self/environ") or "").split("\0") if word)
    requested = {}
    if environ.get("SLURM_CPUS_ON_NODE", "").isdigit():
        requested["cpus"] = int(environ["SLURM_CPUS_ON_NODE"])
    if environ.get("SLURM_MEM_PER_NODE", "").isdigit() and environ["SLURM_MEM_PER_NODE"] != "0":
        requested["memory"] = int(environ["SLURM_MEM_PER_NODE"]) << 20
    status = fields(source.text("/proc/self/status"))
    online = maybe(source.text, "/sys/devices/system/cpu/online") or ""
    return Cgroup(grant, requested, len(members(status.get("Cpus_allowed_list", ""))), len(members(online)))


def _tree(source: NodeSource, groups: Mapping[str, str], controller: str) -> tuple[str, ...]:
    """Return the groups in version 1, which has a tree for every controller."""
    place = next(((names, path) for names, path in groups.items() if controller in names.split(",")), None)
    if place is None:
        return ()
    mount = next((mount for mount in (f"{_ROOT}/{controller}", f"{_ROOT}/{place[0]}") if source.names(mount)), "")
    return _upward(source, mount, place[1]) if mount else ()


def _grant(source: NodeSource, version: int, trees: Mapping[str, tuple[str, ...]]) -> Grant:
    memory, time = trees["memory"], trees["cpu"]
    limit, used, kills, cpus = _FILES[version]
    killed = fields(maybe(source.text, f"{memory[0]}/{kills}") or "", " ").get("oom_kill") if memory else None
    return Grant(
        memory=_least(source, memory, limit),
        used=maybe(source.number, f"{memory[0]}/{used}") if memory else None,
        killed=int(killed) if killed else None,
        cpus=next((count for name in cpus if (count := _cpus(source, trees["cpuset"], name))), None),
        share=min((share for group in time if (share := _share(source, group))), default=None),
        throttled=_throttled(source, time),
        tasks=_least(source, trees["pids"], "pids.max"),
    )


def _share(source: NodeSource, group: str) -> float | None:
    """Return the processors' worth of time of a group, which version 2 has in one file and version 1 in two."""
    quota, _, period = (maybe(source.text, f"{group}/cpu.max") or "").partition(" ")
    if not quota:
        quota, period = (maybe(source.text, f"{group}/cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _upward(source: NodeSource, mount: str, path: str) -> tuple[str, ...]:
    """Return the group and its ancestors; the mount's root if a container shows another tree than the path names."""
    group = f"{mount}{path}".rstrip("/")
    if not source.path(group).is_dir():
        return (mount,)
    above = [group]
    while above[-1] != mount:
        above.append(above[-1].rpartition("/")[0])
    return tuple(above)


def _least(source: NodeSource, groups: tuple[str, ...], name: str) -> int | None:
    texts = (maybe(source.text, f"{group}/{name}") for group in groups)
    return min((int(text) for text in texts if text and text.isdigit() and int(text) < _ENDLESS), default=None)


def _cpus(source: NodeSource, groups: tuple[str, ...], name: str) -> int | None:
    processors = next((text for group in groups if (text := maybe(source.text, f"{group}/{name}"))), None)
    return len(members(processors)) if processors else None


def _throttled(source: NodeSource, groups: tuple[str, ...]) -> float | None:
    stat = fields(maybe(source.text, f"{groups[0]}/cpu.stat") or "", " ") if groups else {}
    periods = int(stat.get("nr_periods", 0))
    return int(stat.get("nr_throttled", 0)) / periods if periods else None


_SETTINGS = (
    "net.core.somaxconn", "net.ipv4.tcp_max_syn_backlog", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.neigh.default.gc_thresh3", "net.ipv4.tcp_mem", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem", "fs.file-max",
    "fs.file-nr", "kernel.pid_max", "kernel.threads-max", "net.netfilter.nf_conntrack_count", "net.netfilter.nf_conntrack_max",
)


@dataclass(frozen=True)
class KernelLimits:
    """Kernel limits."""

    of: Mapping[str, tuple[int, ...]]  # numbers of each setting that this kernel has, by its name in sysctl
    cluster: bool  # True if this is a cluster node: Slurm is set up here, or a fast network exists
    speed: int  # Mb/s of the fastest Ethernet interface that reports it; 0 if none does
    page: int  # bytes of a memory page, the unit of ``net.ipv4.tcp_mem``


def read_scale(source: NodeSource) -> KernelLimits:
    """Read the limits. Raises Unavailable if the kernel's settings are not visible."""
    settings = {}
    for name in _SETTINGS:
        numbers = (maybe(source.text, f"/proc/sys/{name.replace('.', '/')}") or "").replace("-", " ").replace(",", " ").split()
        if numbers:
            settings[name] = tuple(int(number) for number in numbers)
    if not settings:
        raise Unavailable("/proc/sys shows none of its settings")
    cluster = bool(source.names(f"{CLASS}/*") or source.names("/etc/slurm/*") or source.names("/var/spool/slurm*/*"))
    return KernelLimits(settings, cluster, max((interface.speed or 0 for interface in read_interfaces(source)), default=0),
                        int(maybe(source.answer, ("getconf", "PAGESIZE")) or 4096))
