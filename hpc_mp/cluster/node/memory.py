"""Main memory: its size, NUMA nodes and settings, and the part that processes share."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.catalogue import MachineType
from hpc_mp.cluster.node.gpu_pci import read_machine_type
from hpc_mp.cluster.node.mounts import Room, room
from hpc_mp.cluster.node.source import NodeSource, Readings, Unavailable, maybe

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
