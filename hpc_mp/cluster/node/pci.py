"""The PCI path between network adapters, GPUs and memory: links, bridges, the IOMMU, drivers for direct transfers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_mp.cluster.node.gpu_pci import PciGpu, PciLink, read_gpus, read_link
from hpc_mp.cluster.node.rdma import RdmaFabric, read_fabric
from hpc_mp.cluster.node.source import NodeSource, Unavailable, firmware, maybe, real

_BRIDGES = ("lspci", "-D", "-vvv", "-d", "::0604")


@dataclass(frozen=True, kw_only=True)
class Link(PciLink):
    """The link of an adapter."""

    device: str
    address: str


@dataclass(frozen=True)
class Bridges:
    """PCI bridges and the IOMMU."""

    virtual: bool  # True if this is a virtual machine, whose host controls the bridges
    # addresses of bridges whose access control sends transfers between devices up to the root
    redirecting: tuple[str, ...] | Unavailable
    gpus: int  # number of GPUs
    # PCI address of each GPU and adapter to the IOMMU's mode: ``identity`` passes through, ``DMA`` translates
    domains: Mapping[str, str]


@dataclass(frozen=True)
class Rails:
    """GPUs and the adapters of the fast network. ``above``: PCI address to the path of bridges above that device."""

    gpus: tuple[PciGpu, ...]
    fabric: RdmaFabric
    above: Mapping[str, str]
    nodes: int


@dataclass(frozen=True)
class Direct:
    """Requirements for an adapter to read and write a GPU's memory."""

    gpus: int
    fabric: RdmaFabric
    modules: frozenset[str] | Unavailable  # loaded kernel modules
    kernel: tuple[int, int]  # its release as two numbers
    open_driver: bool | None  # True if NVIDIA's driver is the open one; None if none is loaded
    copy_library: bool  # True if a library of GDRCopy is installed


def read_links(source: NodeSource) -> tuple[Link, ...]:
    """Return the links of the RDMA adapters."""
    return tuple(Link(device=adapter.name, address=adapter.address,
                      **vars(read_link(source, f"/sys/bus/pci/devices/{adapter.address}")))
                 for adapter in read_fabric(source).adapters if adapter.address)


def read_bridges(source: NodeSource) -> Bridges:
    devices = [gpu.bus for gpu in read_gpus(source)]
    adapters = [adapter.address for adapter in read_fabric(source).adapters if adapter.address]
    virtual = is_virtual(source)
    redirecting: tuple[str, ...] | Unavailable = ()
    if devices and not virtual:
        try:
            redirecting = _redirecting(source.answer(_BRIDGES), [*devices, *adapters])
        except Unavailable as unseen:
            redirecting = unseen
    domains = {}
    for address in [*devices, *adapters]:
        group = real(source, f"/sys/bus/pci/devices/{address}/iommu_group")
        domain = maybe(source.text, f"/sys/kernel/iommu_groups/{group.rpartition('/')[2]}/type")
        if domain is not None:
            domains[address] = domain
    return Bridges(virtual, redirecting, len(devices), domains)


def read_rails(source: NodeSource) -> Rails:
    fabric, gpus = read_fabric(source), read_gpus(source)
    addresses = [*(gpu.bus for gpu in gpus), *(adapter.address for adapter in fabric.adapters if adapter.address)]
    above = {address: real(source, f"/sys/bus/pci/devices/{address}").rpartition("/")[0] for address in addresses}
    return Rails(gpus, fabric, above, len(source.names("/sys/devices/system/node/node[0-9]*")))


def read_direct(source: NodeSource) -> Direct:
    """Read the requirements for direct transfers. Raises Unavailable."""
    release = re.match(r"(\d+)\.(\d+)", source.text("/proc/sys/kernel/osrelease"))
    modules: frozenset[str] | Unavailable
    try:
        modules = frozenset(line.split()[0] for line in source.text("/proc/modules").splitlines() if line.strip())
    except Unavailable as unseen:
        modules = unseen
    version = maybe(source.text, "/proc/driver/nvidia/version")
    return Direct(
        gpus=sum(gpu.vendor == "nvidia" for gpu in read_gpus(source)),
        fabric=read_fabric(source),
        modules=modules,
        kernel=(int(release[1]), int(release[2])) if release else (0, 0),
        open_driver=None if version is None else "Open Kernel Module" in version,
        copy_library=bool(source.names("/usr/lib*/libgdrapi.so*") + source.names("/usr/lib/*/libgdrapi.so*")
                          + source.names("/opt/*/lib/libgdrapi.so*")),
    )


def is_virtual(source: NodeSource) -> bool:
    """Return True if this is a virtual machine."""
    if " hypervisor" in (maybe(source.text, "/proc/cpuinfo") or ""):
        return True
    vendor, product = firmware(source)
    return product == "Virtual Machine" or vendor == "QEMU" or (vendor == "Amazon EC2" and ".metal" not in product)


def _redirecting(text: str, devices: Sequence[str]) -> tuple[str, ...]:
    """Return the bridges above these devices with ``ACSCtl: … ReqRedir+``. SrcValid checks senders and redirects nothing. Raises
    Unavailable if lspci hides capabilities from users."""
    if "ACSCtl" not in text and "Capabilities: <access denied>" in text:
        raise Unavailable("lspci -vvv shows access control of PCI bridges only to root")
    blocks = re.split(r"\n(?=\S)", text)
    return tuple(block.split()[0] for block in blocks if re.search(r"ACSCtl:.*(ReqRedir|CmpltRedir|UpstreamFwd)\+", block)
                 and any(_is_above(block, device) for device in devices))


def _is_above(bridge: str, device: str) -> bool:
    """Return True if the device's bus is among those of the bridge: ``Bus: primary=15, secondary=16, subordinate=1c``."""
    buses = re.search(r"secondary=([0-9a-f]+), subordinate=([0-9a-f]+)", bridge)
    domain, bus, _ = device.split(":")
    return buses is not None and bridge.startswith(f"{domain}:") and int(buses[1], 16) <= int(bus, 16) <= int(buses[2], 16)
