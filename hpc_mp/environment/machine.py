"""Facts about a machine that identify its platform and validate names in variables."""

from dataclasses import dataclass

from hpc_mp.cluster.node.gpu_pci import read_gpus
from hpc_mp.cluster.node.netdev import read_interfaces
from hpc_mp.cluster.node.rdma import read_fabric
from hpc_mp.cluster.node.source import NodeSource, firmware, maybe


@dataclass(frozen=True, slots=True)
class Shown:
    """Facts about one machine, without its name."""

    # vendor, product: as reported by the firmware; empty if not reported
    vendor: str
    product: str
    gpus: tuple[str, ...]  # one string per GPU, ``nvidia 0x2330``
    layers: dict[str, tuple[str, ...]]  # link layers (``InfiniBand``, ``Ethernet``) of the ports of every RDMA device, by device
    efa: tuple[str, ...]  # Amazon's RDMA devices
    cxi: tuple[str, ...]  # devices of HPE Slingshot
    drivers: tuple[str, ...]  # the driver of every network interface backed by hardware
    interfaces: tuple[str, ...]  # all network interfaces, including the loopback
    route: str | None  # the interface of the default route; None if no default route exists

    def devices(self, layer: str) -> list[str]:
        """Return the RDMA devices with a port of that link layer, without Amazon's."""
        return [device for device, layers in self.layers.items() if layer in layers and device not in self.efa]


def read_machine(source: NodeSource) -> Shown:
    """Read the facts about a machine. Never raises: unavailable facts are empty."""
    adapters, (vendor, product) = read_fabric(source).adapters, firmware(source)
    return Shown(
        vendor=vendor,
        product=product,
        gpus=tuple(f"{gpu.vendor} {gpu.device}" for gpu in read_gpus(source)),
        layers={adapter.name: tuple(port.layer for port in adapter.ports) for adapter in adapters},
        efa=tuple(adapter.name for adapter in adapters if adapter.efa),
        cxi=_names(source, "/sys/class/cxi/*"),
        drivers=tuple(interface.driver for interface in read_interfaces(source)),
        interfaces=_names(source, "/sys/class/net/*"),
        route=_default_route(source),
    )


def _default_route(source: NodeSource) -> str | None:
    """Return the interface of the default route: the first row of the routing table with destination 0.0.0.0."""
    rows = (line.split() for line in (maybe(source.text, "/proc/net/route") or "").splitlines()[1:])
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def _names(source: NodeSource, pattern: str) -> tuple[str, ...]:
    return tuple(path.rpartition("/")[2] for path in source.names(pattern))
