"""Facts about a machine, and detection of its platform by firmware, GPUs, network adapters and their link layers. Machine types
are rows of the catalogue and name their profile. A profile's own marks apply to any machine on such a network."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_mp.catalogue import MachineType, Marks, catalogue
from hpc_mp.cluster.node.gpu_pci import read_gpus
from hpc_mp.cluster.node.netdev import read_interfaces
from hpc_mp.cluster.node.rdma import read_fabric
from hpc_mp.cluster.node.source import NodeSource, firmware, maybe
from hpc_mp.environment.profiles import Detect, Profile, load_profiles


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


@dataclass(frozen=True, slots=True)
class Platform:
    """A detected platform. ``name``: the matching profile, or None; ``evidence``: the observed facts."""

    name: str | None
    evidence: tuple[str, ...]


def platform(machine: Shown, profiles: Sequence[Profile] | None = None) -> Platform:
    """Return the matching platform of the lowest rank, among profiles whose marks all match and the catalogue's machine types."""
    candidates = load_profiles() if profiles is None else profiles
    names = {profile.name for profile in candidates}
    fitting = [(profile.detect.rank, profile.name) for profile in candidates
               if profile.detect is not None and fits(profile.detect, machine)]
    fitting += [(kind.marks.rank, kind.profile) for kind in catalogue().machines.values()
                if kind.marks is not None and kind.profile in names and is_one(kind, kind.marks, machine)]
    return Platform(min(fitting)[1] if fitting else None, tuple(_evidence(machine)))


def fits(criteria: Detect, machine: Shown) -> bool:
    return all((
        criteria.vendor is None or re.match(criteria.vendor, machine.vendor),
        criteria.gpus is None or (bool(machine.gpus) and all(re.fullmatch(criteria.gpus, gpu) for gpu in machine.gpus)),
        len(machine.gpus) >= criteria.least_gpus,
        criteria.layer is None or bool(machine.devices(criteria.layer)),
        not criteria.efa or bool(machine.efa),
        not criteria.cxi or bool(machine.cxi),
    ))


def is_one(kind: MachineType, marks: Marks, machine: Shown) -> bool:
    """Return True if the machine is a complete one of that type: firmware, all its GPUs, and the marks of its network."""
    drivers = Counter(machine.drivers)
    devices = {f"{kind.gpu_vendor} {device}" for device in kind.gpu.pci} if kind.gpu else set()
    return all((
        re.match(marks.vendor, machine.vendor),
        not marks.product or re.fullmatch(marks.product, machine.product),
        len(machine.gpus) >= kind.gpus,
        not devices or devices.issuperset(machine.gpus),
        all(drivers[name] >= least for name, least in marks.drivers.items()),
        not marks.layer or bool(machine.devices(marks.layer)),
        not marks.efa or bool(machine.efa),
    ))


def _evidence(machine: Shown) -> Iterator[str]:
    firmware = " ".join(filter(None, (machine.vendor, machine.product)))
    yield f"firmware: {firmware}" if firmware else "firmware: not shown"
    yield from (f"GPUs: {count} × {gpu}" for gpu, count in Counter(machine.gpus).items())
    if not machine.gpus:
        yield "GPUs: none on the PCI bus"
    for layer in ("InfiniBand", "Ethernet"):
        if devices := machine.devices(layer):
            yield f"RDMA over {layer}: {', '.join(devices)}"
    for network, adapters in (("EFA", machine.efa), ("Slingshot", machine.cxi)):
        if adapters:
            yield f"{network}: {len(adapters)} ({adapters[0]} …)"
    drivers = Counter(filter(None, machine.drivers))
    if drivers:
        yield f"network drivers: {', '.join(f'{count} × {name}' for name, count in sorted(drivers.items()))}"
