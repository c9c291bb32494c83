"""Limits and cgroups of this process, and so of a program started here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.cluster.node.memory import read_meminfo
from hpc_mp.cluster.node.parse import Readings, fields, maybe, members
from hpc_mp.cluster.node.rdma import CLASS
from hpc_mp.cluster.node.source import NodeSource

_LIMITS = "/proc/self/limits"
_LINE = re.compile(r"^Max (.+?)\s{2,}(\S+)\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Limit:
    """A limit; None is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class Limits:
    """Limits of this process.

    Attributes:
        of: limits by the kernel's name: ``locked memory``, ``open files``, ``stack size``, ``processes``.
        rdma: True if RDMA adapters are here, which need locked memory.
        memory: bytes of the machine's main memory; None if the kernel does not report it.
    """

    of: Mapping[str, Limit]
    rdma: bool
    memory: int | None


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


@dataclass(frozen=True)
class Grant:
    """The tightest limits of the group and its ancestors. None is unlimited, or unknown.

    Attributes:
        version: 1 or 2; 0 if no control groups are visible.
        memory, used: bytes.
        killed: processes of the group that were killed for memory.
        cpus: number of processors that it may run on.
        share: processors' worth of time (``cpu.max``).
        throttled: share of the periods in which that time was used up.
        tasks: limit of processes and threads.
    """

    version: int
    memory: int | None
    used: int | None
    killed: int | None
    cpus: int | None
    share: float | None
    throttled: float | None
    tasks: int | None


@dataclass(frozen=True)
class Cgroup:
    """The cgroup of this process.

    Attributes:
        requested: ``cpus`` and ``memory`` (bytes) of this node that Slurm reports for the job; empty without a job.
        allowed: number of processors that this process may use.
        online: number of processors of the machine.
    """

    grant: Grant
    requested: Mapping[str, int]
    allowed: int
    online: int


def read_cgroup(source: NodeSource) -> Cgroup:
    """Read the cgroup. Raises Unavailable."""
    groups = {names: path for _, names, path in (line.split(":", 2) for line in source.text("/proc/self/cgroup").splitlines())}
    unified = source.names(f"{_ROOT}/cgroup.controllers")
    grant = _second(source, groups.get("", "/")) if unified else _first(source, groups)
    environ = dict(word.partition("=")[::2] for word in (maybe(source.text, "/proc/self/environ") or "").split("\0") if word)
    requested = {}
    if environ.get("SLURM_CPUS_ON_NODE", "").isdigit():
        requested["cpus"] = int(environ["SLURM_CPUS_ON_NODE"])
    if environ.get("SLURM_MEM_PER_NODE", "").isdigit() and environ["SLURM_MEM_PER_NODE"] != "0":
        requested["memory"] = int(environ["SLURM_MEM_PER_NODE"]) << 20
    status = fields(source.text("/proc/self/status"))
    online = maybe(source.text, "/sys/devices/system/cpu/online") or ""
    return Cgroup(grant, requested, len(members(status.get("Cpus_allowed_list", ""))), len(members(online)))


def _first(source: NodeSource, groups: Mapping[str, str]) -> Grant:
    """Return the grant in version 1, which has a tree for every controller."""
    def tree(controller: str) -> tuple[str, ...]:
        place = next(((names, path) for names, path in groups.items() if controller in names.split(",")), None)
        if place is None:
            return ()
        mount = next((mount for mount in (f"{_ROOT}/{controller}", f"{_ROOT}/{place[0]}") if source.names(mount)), "")
        return _upward(source, mount, place[1]) if mount else ()

    memory, tasks, time, cpuset = tree("memory"), tree("pids"), tree("cpu"), tree("cpuset")
    shares = [quota / period for group in time
              if (quota := maybe(source.number, f"{group}/cpu.cfs_quota_us") or -1) > 0
              and (period := maybe(source.number, f"{group}/cpu.cfs_period_us"))]
    control = fields(maybe(source.text, f"{memory[0]}/memory.oom_control") or "", " ") if memory else {}
    return Grant(
        version=1 if groups else 0,
        memory=_least(source, memory, "memory.limit_in_bytes"),
        used=maybe(source.number, f"{memory[0]}/memory.usage_in_bytes") if memory else None,
        killed=int(control["oom_kill"]) if "oom_kill" in control else None,
        cpus=_cpus(source, cpuset, "cpuset.effective_cpus") or _cpus(source, cpuset, "cpuset.cpus"),
        share=min(shares, default=None),
        throttled=_throttled(source, time),
        tasks=_least(source, tasks, "pids.max"),
    )


def _second(source: NodeSource, path: str) -> Grant:
    """Return the grant in version 2, which has a single tree."""
    groups = _upward(source, _ROOT, path)
    shares = []
    for group in groups:
        quota, _, period = (maybe(source.text, f"{group}/cpu.max") or "max").partition(" ")
        if quota != "max":
            shares.append(int(quota) / int(period))
    events = fields(maybe(source.text, f"{groups[0]}/memory.events.local") or "", " ")  # without child groups, such as jobs
    return Grant(
        version=2,
        memory=_least(source, groups, "memory.max"),
        used=maybe(source.number, f"{groups[0]}/memory.current"),
        killed=int(events["oom_kill"]) if "oom_kill" in events else None,
        cpus=_cpus(source, groups, "cpuset.cpus.effective"),
        share=min(shares, default=None),
        throttled=_throttled(source, groups),
        tasks=_least(source, groups, "pids.max"),
    )


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
