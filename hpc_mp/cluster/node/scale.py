"""Kernel limits that matter for a job of more than a thousand ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.cluster.node.netdev import read_interfaces
from hpc_mp.cluster.node.rdma import CLASS
from hpc_mp.cluster.node.source import NodeSource, Unavailable, maybe

_SETTINGS = {
    "somaxconn": "net/core/somaxconn",
    "backlog": "net/ipv4/tcp_max_syn_backlog",
    "ports": "net/ipv4/ip_local_port_range",
    "reserved": "net/ipv4/ip_local_reserved_ports",
    "neighbours": "net/ipv4/neigh/default/gc_thresh3",
    "tcp_memory": "net/ipv4/tcp_mem",
    "receive": "net/ipv4/tcp_rmem",
    "send": "net/ipv4/tcp_wmem",
    "files": "fs/file-max",
    "open": "fs/file-nr",
    "pids": "kernel/pid_max",
    "threads": "kernel/threads-max",
    "tracked": "net/netfilter/nf_conntrack_count",
    "trackable": "net/netfilter/nf_conntrack_max",
}


@dataclass(frozen=True)
class KernelLimits:
    """Kernel limits."""

    of: Mapping[str, tuple[int, ...]]  # numbers of each setting that this kernel has
    cluster: bool  # True if this is a cluster node: Slurm is set up here, or a fast network exists
    speed: int  # Mb/s of the fastest Ethernet interface that reports it; 0 if none does
    page: int  # bytes of a memory page, the unit of ``tcp_memory``


def read_scale(source: NodeSource) -> KernelLimits:
    """Read the limits. Raises Unavailable if the kernel's settings are not visible."""
    settings = {}
    for name, file in _SETTINGS.items():
        numbers = (maybe(source.text, f"/proc/sys/{file}") or "").replace("-", " ").replace(",", " ").split()
        if numbers:
            settings[name] = tuple(int(number) for number in numbers)
    if not settings:
        raise Unavailable("/proc/sys shows none of its settings")
    cluster = bool(source.names(f"{CLASS}/*") or source.names("/etc/slurm/*") or source.names("/var/spool/slurm*/*"))
    return KernelLimits(settings, cluster, max((interface.speed or 0 for interface in read_interfaces(source)), default=0),
                        int(maybe(source.answer, ("getconf", "PAGESIZE")) or 4096))
