"""Comparison of a container's view of the machine with the host's view.

Files of the host are missing inside a container: ``/etc/nccl.conf``, the topology file that it names, libraries, device files.
NCCL then silently falls back to something slower. A view is therefore taken on the host and inside the job's container.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_mp.base.findings import Finding, Severity
from hpc_mp.base.text import memory_size, several
from hpc_mp.cluster.node.limits import read_limits
from hpc_mp.cluster.node.memory import read_shared
from hpc_mp.cluster.node.parse import fields, maybe
from hpc_mp.cluster.node.rdma import LIBRARIES, PLUGINS
from hpc_mp.cluster.node.source import NodeSource, Unavailable

View = Mapping[str, Any]
_ENDLESS = 1 << 62
_CLOUD = tuple(f"{place}/*.so*" for place in ("/usr/local/gib/lib64", "/var/lib/tcpx/lib64", "/var/lib/tcpxo/lib64",
                                              "/opt/hpcx/nccl_rdma_sharp_plugin/lib"))


@dataclass(frozen=True)
class Item:
    """An item that both places should show. Its value is a list of names, a number, or True."""

    code: str
    read: Callable[[NodeSource], Any]  # raises Unavailable if the place does not have it
    grave: Severity  # severity of the finding if the container lacks the item or has less of it
    what: str
    reads: str  # for people, as the remedy is
    remedy: str
    formatter: Callable[[float], str] = memory_size


def view(source: NodeSource) -> dict[str, Any]:
    """Return the value of every item by code, None if this place does not show it. Can be serialised as JSON."""
    def value_of(item: Item) -> Any:
        try:
            return item.read(source) or None
        except Unavailable:
            return None
    return {item.code: value_of(item) for item in ITEMS}


def differences(host: View, inside: View) -> Iterator[Finding]:
    """Yield one finding for every item that the host has, with the part that is missing inside the container."""
    for item in ITEMS:
        host_value, inside_value = host.get(item.code), inside.get(item.code)
        if host_value is None:
            continue
        if isinstance(host_value, list):
            lost = [name for name in host_value if name not in (inside_value or [])]
            lacks = bool(lost)
            shown = f"{len(lost)} of {len(host_value)} are missing: {several(lost)}" if lost else f"all {len(host_value)}"
        else:
            lacks = (inside_value or 0) < host_value
            sizes = ("unlimited" if number >= _ENDLESS else item.formatter(number) for number in (inside_value or 0, host_value))
            shown = "{} inside, {} on the host".format(*sizes)
        yield Finding(item.code, item.grave if lacks else "ok", item.what, shown, item.remedy if lacks else "")


def _settings(source: NodeSource) -> list[str]:
    lines = map(str.strip, source.text("/etc/nccl.conf").splitlines())
    return [line for line in lines if "=" in line and not line.startswith("#")]


def _topology(source: NodeSource) -> list[str]:
    """Return the existing files that NCCL_TOPO_FILE and NCCL_GRAPH_FILE name."""
    paths = [value for name, _, value in (line.partition("=") for line in _settings(source))
             if name in ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE")]
    return [name for name in paths if name and source.names(name)]


def _names(*patterns: str) -> Callable[[NodeSource], list[str]]:
    return lambda source: [name for pattern in patterns for name in source.names(pattern)]


def _limit(name: str) -> Callable[[NodeSource], int]:
    def read(source: NodeSource) -> int:
        soft = read_limits(source).of[name].soft
        return _ENDLESS if soft is None else soft
    return read


def _shared(source: NodeSource) -> int:
    return read_shared(source).room.size


def _interfaces(source: NodeSource) -> list[str]:
    return [path.rpartition("/")[2] for path in source.names("/sys/class/net/*")
            if (maybe(source.text, f"{path}/operstate") or "") in ("up", "unknown")
            and source.names(f"{path}/device")]


def _memory(source: NodeSource) -> int:
    return int(fields(source.text("/proc/meminfo"))["MemTotal"].split()[0]) << 10


_DEVICES = "bind the host's device files (apptainer --nv, pyxis with MELLANOX_VISIBLE_DEVICES=all and ENROOT_RESTRICT_DEV=n)"
ITEMS: tuple[Item, ...] = (
    Item("container-nccl-conf", _settings, "warning", "/etc/nccl.conf", "lines of `/etc/nccl.conf`",
         "bind /etc/nccl.conf into the container, or set its variables in [environment]"),
    Item("container-topology", _topology, "warning", "NCCL's topology file",
         "the file that NCCL_TOPO_FILE in `/etc/nccl.conf` names",
         "bind the directory of that file into the container"),
    Item("container-uverbs", _names("/dev/infiniband/uverbs*"), "error", "device files for RDMA",
         "`/dev/infiniband/uverbs*`", _DEVICES),
    Item("container-rdma", _names("/sys/class/infiniband/*"), "error", "RDMA devices", "`/sys/class/infiniband/*`", _DEVICES),
    Item("container-gpus", _names("/dev/nvidia[0-9]*", "/dev/kfd"), "error", "device files of GPUs",
         "`/dev/nvidia[0-9]*`, `/dev/kfd`",
         "apptainer --nv (or --rocm); NVIDIA_VISIBLE_DEVICES=all for pyxis; request GPUs per node and not per task"),
    Item("container-channels", _names("/dev/nvidia-caps-imex-channels/*"), "error", "IMEX channels",
         "`/dev/nvidia-caps-imex-channels/*`", _DEVICES),
    Item("container-gdrdrv", _names("/dev/gdrdrv"), "warning", "GDRCopy's device file", "`/dev/gdrdrv`", _DEVICES),
    Item("container-efa", _names(*LIBRARIES[:1], *PLUGINS), "warning", "libraries for EFA", "`/opt/amazon/{efa,ofi-nccl}`",
         "use an image with aws-ofi-nccl, or bind /opt/amazon into the container"),
    Item("container-plugins", _names(*_CLOUD), "warning", "NCCL plug-ins of the cloud",
         "gIB, TCPX, TCPXO and SHARP plug-ins in their places",
         "bind that directory into the container and put it on LD_LIBRARY_PATH"),
    Item("container-interfaces", _interfaces, "error", "network interfaces", "`/sys/class/net/*`",
         "share the host's network (--net=host); pyxis and apptainer do so by default"),
    Item("container-memlock", _limit("locked memory"), "error", "limit of locked memory", "`/proc/self/limits`",
         "--ulimit memlock=-1, or raise the limit of the service that starts containers"),
    Item("container-nofile", _limit("open files"), "warning", "limit of open files", "`/proc/self/limits`",
         "--ulimit nofile=1048576", str),
    Item("container-shm", _shared, "error", "/dev/shm", "`/dev/shm` (statfs)",
         "--ipc=host or --shm-size; pyxis and apptainer bind it"),
    Item("container-memory", _memory, "warning", "memory", "`/proc/meminfo`", "raise the container's limit of memory"),
)
