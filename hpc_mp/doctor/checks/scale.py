"""Checks of kernel limits that a job of more than a thousand ranks reaches."""

from collections.abc import Callable, Iterator

from hpc_mp.base.text import memory_size
from hpc_mp.cluster.node.scale import KernelLimits, read_scale
from hpc_mp.doctor.checks.check import Check, Judgement

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


CHECKS: tuple[Check[KernelLimits], ...] = (
    Check("kernel-somaxconn", read_scale, _least("net.core.somaxconn", "somaxconn", 4096),
          "`/proc/sys/net/core/somaxconn`", "warning: below 4096 in a cluster",
          "sysctl net.core.somaxconn=65535: rank 0 is called by all others at once"),
    Check("kernel-backlog", read_scale, _least("net.ipv4.tcp_max_syn_backlog", "backlog", 2048),
          "`/proc/sys/net/ipv4/tcp_max_syn_backlog`", "warning: below 2048 in a cluster",
          "sysctl net.ipv4.tcp_max_syn_backlog=65535"),
    Check("kernel-neighbours", read_scale, _least("net.ipv4.neigh.default.gc_thresh3", "neighbours", 4096),
          "`/proc/sys/net/ipv4/neigh/default/gc_thresh3`",
          "warning: below 4096 in a cluster: with 1024 hosts in one network `Neighbour table overflow` cuts connections",
          "sysctl net.ipv4.neigh.default.gc_thresh3=16384, gc_thresh2=8192, gc_thresh1=4096"),
    Check("kernel-files", read_scale, files, "`/proc/sys/fs/{file-max,file-nr}`",
          "warning: 90 % are open; below 1,000,000 in a cluster", "sysctl fs.file-max=4194304"),
    Check("kernel-pids", read_scale, _least("kernel.pid_max", "pids", 65_536), "`/proc/sys/kernel/pid_max`",
          "warning: below 65,536 in a cluster",
          "sysctl kernel.pid_max=4194304: every thread counts, and a rank of NCCL and data workers has hundreds"),
    Check("kernel-threads", read_scale, _least("kernel.threads-max", "threads", 65_536),
          "`/proc/sys/kernel/threads-max`", "warning: below 65,536 in a cluster", "sysctl kernel.threads-max=4194304"),
    Check("port-range", read_scale, ports, "`/proc/sys/net/ipv4/{ip_local_port_range,ip_local_reserved_ports}`",
          "warning: fewer than 20,000 ports, or a tenth of 10000–29999 among them and not reserved",
          "sysctl net.ipv4.ip_local_port_range='32768 60999'"),
    Check("tcp-buffers", read_scale, buffers, "`/proc/sys/net/ipv4/{tcp_rmem,tcp_wmem}`",
          "warning: below 16 MiB where Ethernet is faster than 10 Gb/s",
          "sysctl net.ipv4.tcp_rmem='4096 131072 67108864' net.ipv4.tcp_wmem='4096 65536 67108864'"),
    Check("tcp-memory", read_scale, tcp_memory, "`/proc/sys/net/ipv4/tcp_mem`", "warning: below 1 GiB in a cluster",
          "raise net.ipv4.tcp_mem: rank 0 of a large job holds thousands of connections"),
    Check("connection-tracking", read_scale, tracking, "`/proc/sys/net/netfilter/nf_conntrack_{count,max}`",
          "error: more than 90 %: new connections are then dropped",
          "sysctl net.netfilter.nf_conntrack_max=1048576, or no tracking between nodes"),
)
