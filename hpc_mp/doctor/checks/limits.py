"""Checks of process limits, of the control group's limits, and of kernel limits that a job of more than a thousand ranks
reaches."""

from collections.abc import Callable, Iterator

from hpc_mp.base.findings import Severity
from hpc_mp.base.text import memory_size
from hpc_mp.cluster.node.limits import Cgroup, KernelLimits, Limit, Limits, read_cgroup, read_limits, read_scale
from hpc_mp.doctor.checks.check import Judgement, checks_of

_FILES, _FEW_FILES = 131_072, 16_384
_PROCESSES = 16_384
_STACK = 8 << 20
_FULL = 0.95
_ALL = 0.95  # of the memory; the firmware reserves some of the installed memory
_THROTTLED = 0.05


def locked(limits: Limits) -> Iterator[Judgement]:
    limit = limits.of["locked memory"]
    if limit.soft is None or (limits.memory and limit.soft >= _ALL * limits.memory):
        yield Judgement("ok", "unlimited" if limit.soft is None else "as much as there is memory, or more")
    else:
        why = "adapters for RDMA are here, which lock what they send" if limits.rdma else "no adapter for RDMA is here"
        yield Judgement("error" if limits.rdma else "ok", f"{memory_size(limit.soft)}; {why}")


def files(limits: Limits) -> Iterator[Judgement]:
    limit = limits.of["open files"]
    highest = float("inf") if limit.hard is None else limit.hard
    grave: Severity = "ok" if highest >= _FILES else "warning"
    if highest < _FEW_FILES:
        grave = "error" if limits.rdma else "warning"
    yield Judgement(grave, f"{_both(limit)}; {_FILES} serve any job")


def stack(limits: Limits) -> Iterator[Judgement]:
    limit = limits.of["stack size"]
    if limit.soft is None:
        yield Judgement("warning", "unlimited: threads then get 2 MiB, too little for NCCL before 2.28")
    else:
        yield Judgement("ok" if limit.soft >= _STACK else "warning", memory_size(limit.soft))


def processes(limits: Limits) -> Iterator[Judgement]:
    limit = limits.of["processes"]
    enough = limit.soft is None or limit.soft >= _PROCESSES
    yield Judgement("ok" if enough else "warning", f"{_both(limit)} processes and threads of this user")


def _both(limit: Limit) -> str:
    return " of ".join("unlimited" if value is None else str(value) for value in (limit.soft, limit.hard))


def memory(cgroup: Cgroup) -> Iterator[Judgement]:
    limit, used, requested = cgroup.grant.memory, cgroup.grant.used or 0, cgroup.requested.get("memory")
    if limit is None:
        yield Judgement("ok", "no limit")
    elif requested is not None and limit < requested:
        yield Judgement("error", f"the control group grants {memory_size(limit)}, the job asked for {memory_size(requested)}")
    elif used > _FULL * limit:
        yield Judgement("warning", f"{memory_size(used)} of {memory_size(limit)} are used; page cache and /dev/shm count",
                        fix="ask for more memory, or find what fills it: processes are killed when it is full")
    else:
        yield Judgement("ok", f"{memory_size(used)} of {memory_size(limit)} are used")


def killed(cgroup: Cgroup) -> Iterator[Judgement]:
    if cgroup.grant.killed is not None:
        bad = cgroup.grant.killed > 0
        yield Judgement("warning" if bad else "ok", f"{cgroup.grant.killed} processes were killed for memory")


def cpus(cgroup: Cgroup) -> Iterator[Judgement]:
    requested, grant = cgroup.requested.get("cpus"), cgroup.grant
    have = min(count for count in (grant.cpus, cgroup.allowed, grant.share) if count is not None)
    if requested is not None and have < requested:
        yield Judgement("error", f"{have:g} processors may be used, the job asked for {requested}")
    elif grant.throttled is not None and grant.throttled > _THROTTLED:
        yield Judgement("warning",
                        f"the time of {grant.share or have:g} processors was used up in {grant.throttled:.0%} of the periods",
                        fix="ask for more processors, or start fewer threads")
    else:
        yield Judgement("ok", f"{have:g} of {cgroup.online} processors may be used")


def tasks(cgroup: Cgroup) -> Iterator[Judgement]:
    limit = cgroup.grant.tasks
    if limit is not None:
        yield Judgement("ok" if limit >= _PROCESSES else "warning", f"{limit} processes and threads may exist")


CHECKS = (
    *checks_of(read_limits, {"limit-memlock": locked, "limit-nofile": files, "limit-stack": stack, "limit-processes": processes}),
    *checks_of(read_cgroup, {"cgroup-memory": memory, "cgroup-oom": killed, "cgroup-cpus": cpus, "cgroup-pids": tasks}),
)


_PORTS = 20_000
_OURS = range(10_000, 30_000)  # ports for the rendezvous of ranks
_FAST = 10_000  # Mb/s above which a connection needs large buffers
_BUFFER = 16 << 20
_TCP = 1 << 30


def _least(setting: str, least: int) -> Callable[[KernelLimits], Iterator[Judgement]]:
    """Return a judge of one setting that should be at least ``least`` in a cluster."""
    def judge(scale: KernelLimits) -> Iterator[Judgement]:
        if setting in scale.of:
            value = scale.of[setting][0]
            bad = value < least and scale.cluster
            yield Judgement("warning" if bad else "ok", f"{setting} = {value}; {least} serve thousands of ranks")
    return judge


def ports(scale: KernelLimits) -> Iterator[Judgement]:
    if "net.ipv4.ip_local_port_range" not in scale.of:
        return
    low, high = scale.of["net.ipv4.ip_local_port_range"]
    reserved = scale.of.get("net.ipv4.ip_local_reserved_ports", ())
    size, within = high - low + 1, len(range(max(low, _OURS.start), min(high + 1, _OURS.stop)))
    covered = len(reserved) >= 2 and reserved[0] <= _OURS.start and reserved[1] >= _OURS.stop - 1
    evidence = f"net.ipv4.ip_local_port_range = {low} {high}"
    if size < _PORTS and scale.cluster:
        yield Judgement("warning", f"{evidence}: {size} ports for outgoing connections")
    elif within > 0.1 * len(_OURS) and not covered:
        yield Judgement("warning",
                        f"{evidence} takes in {within} of the ports 10000 to 29999: one where ranks are to meet may be in use")
    else:
        yield Judgement("ok", evidence)


def buffers(scale: KernelLimits) -> Iterator[Judgement]:
    if "net.ipv4.tcp_rmem" not in scale.of or "net.ipv4.tcp_wmem" not in scale.of:
        return
    least = min(scale.of["net.ipv4.tcp_rmem"][-1], scale.of["net.ipv4.tcp_wmem"][-1])
    bad = least < _BUFFER and scale.speed > _FAST and scale.cluster
    yield Judgement("warning" if bad else "ok", f"a connection's buffer may grow to {memory_size(least)}"
                    + (f"; the fastest interface has {scale.speed / 1000:g} Gb/s" if scale.speed else ""))


def tcp_memory(scale: KernelLimits) -> Iterator[Judgement]:
    if "net.ipv4.tcp_mem" in scale.of:
        pressure = scale.of["net.ipv4.tcp_mem"][1] * scale.page
        bad = pressure < _TCP and scale.cluster
        yield Judgement("warning" if bad else "ok", f"connections may hold {memory_size(pressure)} before they are slowed")


def tracking(scale: KernelLimits) -> Iterator[Judgement]:
    if scale.of.get("net.netfilter.nf_conntrack_max", (0,))[0]:
        tracked, limit = scale.of.get("net.netfilter.nf_conntrack_count", (0,))[0], scale.of["net.netfilter.nf_conntrack_max"][0]
        yield Judgement("error" if tracked > 0.9 * limit else "ok", f"{tracked} of {limit} connections are tracked")


def open_files(scale: KernelLimits) -> Iterator[Judgement]:
    if "fs.file-max" in scale.of and "fs.file-nr" in scale.of:
        opened, limit = scale.of["fs.file-nr"][0], scale.of["fs.file-max"][0]
        bad = opened > 0.9 * limit or (scale.cluster and limit < 1_000_000)
        yield Judgement("warning" if bad else "ok", f"{opened} files are open, fs.file-max = {limit}")


KERNEL = checks_of(read_scale, {
    "kernel-somaxconn": _least("net.core.somaxconn", 4096),
    "kernel-backlog": _least("net.ipv4.tcp_max_syn_backlog", 2048),
    "kernel-neighbours": _least("net.ipv4.neigh.default.gc_thresh3", 4096),
    "kernel-files": open_files,
    "kernel-pids": _least("kernel.pid_max", 65_536),
    "kernel-threads": _least("kernel.threads-max", 65_536),
    "port-range": ports,
    "tcp-buffers": buffers,
    "tcp-memory": tcp_memory,
    "connection-tracking": tracking,
})
