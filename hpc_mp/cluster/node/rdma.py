"""Network adapters with RDMA: InfiniBand, RoCE, EFA."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.catalogue import MachineType
from hpc_mp.cluster.node.gpu_pci import read_machine_type
from hpc_mp.cluster.node.source import NodeSource, Unavailable, maybe, real

CLASS = "/sys/class/infiniband"
AMAZON = "0x1d0f"
_FABRIC_PCI = (("0x15b3", "0x0207"), ("0x15b3", "0x0200"), (AMAZON, "0x0200"))  # vendor, class of adapters that may do RDMA
_EFA_MODELS = ("0xefa0", "0xefa1", "0xefa2", "0xefa3", "0xefa4")
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_MTUS = {"256": 256, "512": 512, "1024": 1024, "2048": 2048, "4096": 4096}


@dataclass(frozen=True)
class Gid:
    """A GID. ``type``: ``IB/RoCE v1`` or ``RoCE v2``."""

    index: int
    value: str
    type: str


@dataclass(frozen=True)
class RdmaPort:
    """One port. A field is None if the kernel does not show it."""

    # device, number: ``mlx5_2``, 1
    device: str
    number: int
    # state, physical: in the kernel's form: ``4: ACTIVE``, ``5: LinkUp``
    state: str
    physical: str
    rate: float | None  # Gb/s
    layer: str  # ``InfiniBand``, ``Ethernet`` (RoCE) or ``Unknown`` (EFA)
    # lid, manager: own and subnet manager's address; InfiniBand only
    lid: int | None
    manager: int | None
    keys: Mapping[int, int]  # the partition table: index to key
    gids: tuple[Gid, ...]
    mtu: int | None  # bytes of a packet in use
    dropped: int | None  # number of times that the link went down, since the counter was reset

    @property
    def name(self) -> str:
        return f"{self.device} port {self.number}"

    @property
    def up(self) -> bool:
        return self.state.endswith("ACTIVE") and self.physical.endswith("LinkUp")


@dataclass(frozen=True)
class RdmaAdapter:
    """One device of the RDMA stack. ``numa`` is None if the kernel does not know it."""

    name: str
    address: str  # on the PCI bus; empty for an adapter without one (Soft RoCE)
    # vendor, model: PCI numbers
    vendor: str
    model: str
    # firmware, board: as reported by the adapter
    firmware: str
    board: str
    numa: int | None
    verbs: bool | None  # True if its device file exists and this user may use it; None if it has none
    ports: tuple[RdmaPort, ...]
    virtual: bool = False  # True for a virtual function or sub-function of an adapter of this machine, idle until it is assigned

    @property
    def card(self) -> str:
        """Its address without the function: a card with two ports has a device for each."""
        return self.address.rpartition(".")[0] or self.name

    @property
    def efa(self) -> bool:
        return self.vendor == AMAZON


@dataclass(frozen=True)
class RdmaFabric:
    """The fast network as this machine sees it."""

    adapters: tuple[RdmaAdapter, ...]  # all adapters of the RDMA stack
    kind: MachineType | None  # the machine's type in the catalogue; None if unknown
    bare: tuple[str, ...]  # PCI addresses of RDMA adapters that no driver has bound
    # versions of the kernel's interfaces for verbs and management; None if that module is not loaded
    abi: Mapping[str, int | None]

    @property
    def ports(self) -> tuple[RdmaPort, ...]:
        """Ports of the fast network: those of InfiniBand or EFA if any exist, else those of RoCE."""
        every = [(adapter.efa, port) for adapter in self.adapters for port in adapter.ports]
        return tuple(port for efa, port in every if efa or port.layer == "InfiniBand") or tuple(port for _, port in every)

    def adapter(self, port: RdmaPort) -> RdmaAdapter:
        return next(adapter for adapter in self.adapters if adapter.name == port.device)


def read_fabric(source: NodeSource) -> RdmaFabric:
    """Read the adapters. Never raises: a machine without a fast network has no adapters."""
    mtus = _active_mtus(source)
    adapters = tuple(_adapter(source, path.rpartition("/")[2], mtus) for path in source.names(f"{CLASS}/*"))
    taken = {adapter.address for adapter in adapters}
    bare = tuple(address for address in _able(source) if address not in taken)
    abi = {name: maybe(source.number, f"/sys/class/infiniband_{name}/abi_version") for name in ("verbs", "mad")}
    return RdmaFabric(adapters, read_machine_type(source), bare, abi)


def _adapter(source: NodeSource, name: str, mtus: Mapping[tuple[str, int], int]) -> RdmaAdapter:
    base = f"{CLASS}/{name}"
    where = real(source, f"{base}/device")
    address = where.rpartition("/")[2]
    numa = maybe(source.number, f"{base}/device/numa_node")
    ports = tuple(_port(source, name, int(path.rpartition("/")[2]), mtus) for path in source.names(f"{base}/ports/*"))
    return RdmaAdapter(
        name=name,
        address=address if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", address) else "",
        vendor=maybe(source.text, f"{base}/device/vendor") or "",
        model=maybe(source.text, f"{base}/device/device") or "",
        firmware=maybe(source.text, f"{base}/fw_ver") or "",
        board=maybe(source.text, f"{base}/board_id") or "",
        numa=numa if numa is not None and numa >= 0 else None,
        verbs=_verbs(source, name),
        ports=tuple(sorted(ports, key=lambda port: port.number)),
        virtual=is_virtual_function(source, f"{base}/device") or ".sf." in where,
    )


def _port(source: NodeSource, device: str, number: int, mtus: Mapping[tuple[str, int], int]) -> RdmaPort:
    base = f"{CLASS}/{device}/ports/{number}"
    rate = re.match(r"\d+(?:\.\d+)?", maybe(source.text, f"{base}/rate") or "")
    layer = maybe(source.text, f"{base}/link_layer") or "Unknown"
    band = layer == "InfiniBand"
    keys = {int(path.rpartition("/")[2]): maybe(source.number, path) for path in source.names(f"{base}/pkeys/*")}
    return RdmaPort(
        device=device,
        number=number,
        state=maybe(source.text, f"{base}/state") or "",
        physical=maybe(source.text, f"{base}/phys_state") or "",
        rate=float(rate[0]) if rate else None,
        layer=layer,
        lid=maybe(source.number, f"{base}/lid") if band else None,
        manager=maybe(source.number, f"{base}/sm_lid") if band else None,
        keys={index: key for index, key in sorted(keys.items()) if key},
        gids=tuple(sorted(_gids(source, base), key=lambda gid: gid.index)),
        mtu=mtus.get((device, number)),
        dropped=maybe(source.number, f"{base}/counters/link_downed"),
    )


def _gids(source: NodeSource, base: str) -> list[Gid]:
    gids = []
    for path in source.names(f"{base}/gids/*"):
        value, index = maybe(source.text, path), path.rpartition("/")[2]
        if value and value != _NO_GID:
            gids.append(Gid(int(index), value, maybe(source.text, f"{base}/gid_attrs/types/{index}") or ""))
    return gids


def _active_mtus(source: NodeSource) -> dict[tuple[str, int], int]:
    """Return MTUs in use from ``ibv_devinfo``, which may be missing: the kernel does not show them."""
    if not source.names(f"{CLASS}/*"):
        return {}
    try:
        text = source.answer(("ibv_devinfo",))
    except Unavailable:
        return {}
    mtus, device, port = {}, "", 0
    for name, value in re.findall(r"^\s*(hca_id|port|active_mtu):\s*(\S+)", text, re.MULTILINE):
        if name == "hca_id":
            device = value
        elif name == "port":
            port = int(value)
        elif value in _MTUS:
            mtus[device, port] = _MTUS[value]
    return mtus


def _verbs(source: NodeSource, device: str) -> bool | None:
    """Return True if ``/dev/infiniband/uverbsN`` of this device exists; None if the kernel has none for the device."""
    for path in source.names("/sys/class/infiniband_verbs/uverbs*"):
        if maybe(source.text, f"{path}/ibdev") == device:
            return bool(source.names(f"/dev/infiniband/{path.rpartition('/')[2]}"))
    return None


def _able(source: NodeSource) -> list[str]:
    """Return PCI addresses of adapters that support RDMA, bound by a driver or not."""
    addresses = []
    for path in source.names("/sys/bus/pci/devices/*/vendor"):
        base = path.rpartition("/")[0]
        numbers = maybe(source.text, path) or "", (maybe(source.text, f"{base}/class") or "")[:6]
        if is_virtual_function(source, base) or numbers not in _FABRIC_PCI:
            continue
        if numbers[0] != AMAZON or maybe(source.text, f"{base}/device") in _EFA_MODELS:
            addresses.append(base.rpartition("/")[2])
    return addresses


def is_virtual_function(source: NodeSource, base: str) -> bool:
    """Return True for a function of an adapter of this machine; a virtual machine does not see the adapter itself."""
    return os.path.lexists(source.path(f"{base}/physfn"))


LIBRARIES = ("/opt/amazon/efa/lib*/libfabric.so*", "/usr/lib*/libfabric.so*", "/usr/lib/*/libfabric.so*")
_PLACES = ("/opt/amazon/ofi-nccl/lib*", "/opt/amazon/ofi-nccl/lib/*", "/opt/aws-ofi-nccl/lib*", "/opt/aws-ofi-nccl/install/lib",
           "/opt/amazon/efa/lib*")
PLUGINS = tuple(f"{place}/{name}" for place in _PLACES for name in ("libnccl-net*.so*", "libnccl-ofi*.so*"))


@dataclass(frozen=True)
class Efa:
    """``driver``: version of the kernel module; ``library``: libfabric; ``plugin``: NCCL's plugin for it. None: not installed."""

    fabric: RdmaFabric
    driver: str | None
    library: str | None
    plugin: str | None


def read_efa(source: NodeSource) -> Efa:
    """Read the EFA software. Never raises."""
    def first(patterns: tuple[str, ...]) -> str | None:
        return next((name for pattern in patterns for name in source.names(pattern)), None)

    return Efa(read_fabric(source), maybe(source.text, "/sys/module/efa/version"), first(LIBRARIES), first(PLUGINS))
