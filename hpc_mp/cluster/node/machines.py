"""Machines that clouds rent out, and what is in them. Data, as Python, because a node's own interpreter must be able to read it.

Sources: Azure's and AWS's size pages; conf/*.conf of Azure's azurehpc-health-checks (cores, memory, ports and their rates, NVMe
disks); the topology files of azhpc-images and aws-ofi-nccl (NUMA nodes).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_mp.cluster.node.gpu_pci import read_gpus
from hpc_mp.cluster.node.parse import maybe
from hpc_mp.cluster.node.source import Source


@dataclass(frozen=True)
class Kind:
    """What a healthy one has.

    Attributes:
        name: as its cloud calls it.
        gpus, ports: how many; ports are those of the fast network.
        rate: Gb/s of a port.
        sockets, cpus, numa: packages, logical processors, NUMA nodes that have processors.
        memory: GiB that the kernel shows; None where it counts GPUs' memory too.
        disks: NVMe disks of the node's own; None where it depends on the image.
        optional: it may be had without a fast network, and looks the same otherwise.
    """

    name: str
    gpus: int
    ports: int
    rate: float
    sockets: int
    cpus: int
    numa: int
    memory: float | None
    disks: int | None = None
    optional: bool = False


KINDS: tuple[Kind, ...] = (
    Kind("Standard_ND96asr_v4", 8, 8, 200, 2, 96, 4, 886),
    Kind("Standard_ND96amsr_A100_v4", 8, 8, 200, 2, 96, 4, 1772),
    Kind("Standard_ND96isr_H100_v5", 8, 8, 400, 2, 96, 2, 1870, 8, optional=True),
    Kind("Standard_ND96isr_H200_v5", 8, 8, 400, 2, 96, 2, 1821, 8, optional=True),
    Kind("Standard_ND96isr_MI300X_v5", 8, 8, 400, 2, 96, 2, 1821, 8),
    Kind("Standard_ND128isr_NDR_GB200_v6", 4, 4, 400, 2, 128, 2, None),
    Kind("p4d.24xlarge", 8, 4, 100, 2, 96, 2, 1121, 8, optional=True),
    Kind("p4de.24xlarge", 8, 4, 100, 2, 96, 2, 1121, 8, optional=True),
    Kind("p5.48xlarge", 8, 32, 100, 2, 192, 2, 1999, 8, optional=True),
    Kind("p5e.48xlarge", 8, 32, 100, 2, 192, 2, 1999, 8, optional=True),
    Kind("p5en.48xlarge", 8, 16, 200, 2, 192, 2, 1999, 8, optional=True),
    Kind("p6-b200.48xlarge", 8, 8, 400, 2, 192, 2, 1999, 8, optional=True),
)
_AZURE = {  # PCI number of the GPU: the size; Azure's firmware names none
    "0x20b0": "Standard_ND96asr_v4",
    "0x20b2": "Standard_ND96amsr_A100_v4",
    "0x2330": "Standard_ND96isr_H100_v5",
    "0x2335": "Standard_ND96isr_H200_v5",
    "0x74b5": "Standard_ND96isr_MI300X_v5",  # a virtual function
    "0x2941": "Standard_ND128isr_NDR_GB200_v6",
}
_DMI = "/sys/class/dmi/id"


def read_kind(source: Source) -> Kind | None:
    """Which of them this is, from its firmware's words and its GPUs, never from a host name; None for any other machine."""
    vendor = maybe(source.text, f"{_DMI}/sys_vendor") or ""
    name = maybe(source.text, f"{_DMI}/product_name") or ""
    if vendor.startswith("Microsoft"):
        name = next((_AZURE[gpu.device] for gpu in read_gpus(source) if gpu.device in _AZURE), "")
        cpus = next((kind.cpus for kind in KINDS if kind.name == name), 0)
        present = len(source.names("/sys/devices/system/cpu/cpu[0-9]*"))
        if present < cpus:  # the smaller sizes have the same GPUs, fewer of them
            return None
    return next((kind for kind in KINDS if kind.name == name), None)
