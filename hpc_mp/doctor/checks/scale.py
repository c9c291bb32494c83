"""Checks of kernel limits that a job of more than a thousand ranks reaches."""

from collections.abc import Callable, Iterator

from hpc_mp.base.text import memory_size
from hpc_mp.cluster.node.limits import KernelLimits, read_scale
from hpc_mp.doctor.checks.check import Judgement, checks_of

_PORTS = 20_000
_OURS = range(10_000, 30_000)  # ports for the rendezvous of ranks
_FAST = 10_000  # Mb/s above which a connection needs large buffers
_BUFFER = 16 << 20
_TCP = 1 << 30


def _least(setting: str, name: str, least: int) -> Callable[[KernelLimits], Iterator[Judgement]]:
    """Return a judge of one setting that should be at least ``least`` in a cluster."""
    def judge(scale: KernelLimits) -> Iterator[Judgement]:
        if name in scale.of:
            value = scale.of[name][0]
            bad = value < least and scale.cluster
            yield Judgement("warning" if bad else "ok", f"{setting} = {value}; {least} serve thousands of ranks")
    return judge


def ports(scale: KernelLimits) -> Iterator[Judgement]:
    if "ports" not in scale.of:
        return
    low, high = scale.of["ports"]
    reserved = scale.of.get("reserved", ())
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
    if "receive" not in scale.of or "send" not in scale.of:
        return
    least = min(scale.of["receive"][-1], scale.of["send"][-1])
    bad = least < _BUFFER and scale.speed > _FAST and scale.cluster
    yield Judgement("warning" if bad else "ok", f"a connection's buffer may grow to {memory_size(least)}"
                    + (f"; the fastest interface has {scale.speed / 1000:g} Gb/s" if scale.speed else ""))


def tcp_memory(scale: KernelLimits) -> Iterator[Judgement]:
    if "tcp_memory" in scale.of:
        pressure = scale.of["tcp_memory"][1] * scale.page
        bad = pressure < _TCP and scale.cluster
        yield Judgement("warning" if bad else "ok", f"connections may hold {memory_size(pressure)} before they are slowed")


def tracking(scale: KernelLimits) -> Iterator[Judgement]:
    if scale.of.get("trackable", (0,))[0]:
        tracked, limit = scale.of.get("tracked", (0,))[0], scale.of["trackable"][0]
        yield Judgement("error" if tracked > 0.9 * limit else "ok", f"{tracked} of {limit} connections are tracked")


def files(scale: KernelLimits) -> Iterator[Judgement]:
    if "files" in scale.of and "open" in scale.of:
        opened, limit = scale.of["open"][0], scale.of["files"][0]
        bad = opened > 0.9 * limit or (scale.cluster and limit < 1_000_000)
        yield Judgement("warning" if bad else "ok", f"{opened} files are open, fs.file-max = {limit}")


CHECKS = checks_of(read_scale, {
    "kernel-somaxconn": _least("net.core.somaxconn", "somaxconn", 4096),
    "kernel-backlog": _least("net.ipv4.tcp_max_syn_backlog", "backlog", 2048),
    "kernel-neighbours": _least("net.ipv4.neigh.default.gc_thresh3", "neighbours", 4096),
    "kernel-files": files,
    "kernel-pids": _least("kernel.pid_max", "pids", 65_536),
    "kernel-threads": _least("kernel.threads-max", "threads", 65_536),
    "port-range": ports,
    "tcp-buffers": buffers,
    "tcp-memory": tcp_memory,
    "connection-tracking": tracking,
})
