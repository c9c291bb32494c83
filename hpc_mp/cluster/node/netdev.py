"""Network interfaces."""

from dataclasses import dataclass

from hpc_mp.cluster.node.source import NodeSource, maybe

CLASS = "/sys/class/net"
ETHERNET = 1  # ARPHRD_ETHER


@dataclass(frozen=True)
class NetworkInterface:
    """A hardware interface, or a bond. A field is None if the kernel does not show it."""

    name: str
    kind: int  # 1 Ethernet, 32 IP over InfiniBand
    state: str  # ``up``, ``down`` …; ``unknown`` for drivers that do not report it
    speed: int | None  # Mb/s; None without a link, and in many virtual machines
    duplex: str | None
    mtu: int | None
    driver: str
    physical: bool  # True if it belongs to a device
    managed: bool  # True if an administrator has set it to be up
    ups: int | None  # number of links up since boot; None if that is not counted
    members: tuple[str, ...] = ()  # interfaces of a bond


def read_interfaces(source: NodeSource) -> tuple[NetworkInterface, ...]:
    """Return the interfaces without the loopback and software interfaces (bridges, tunnels, containers' ends)."""
    interfaces = (_interface(source, path) for path in source.names(f"{CLASS}/*"))
    return tuple(interface for interface in interfaces if interface.physical or interface.members)


def _interface(source: NodeSource, path: str) -> NetworkInterface:
    flags = maybe(source.number, f"{path}/flags") or 0
    speed = maybe(source.number, f"{path}/speed")
    driver = source.path(f"{path}/device/driver")
    return NetworkInterface(
        name=path.rpartition("/")[2],
        kind=maybe(source.number, f"{path}/type") or 0,
        state=maybe(source.text, f"{path}/operstate") or "unknown",
        speed=speed if speed and speed > 0 else None,
        duplex=maybe(source.text, f"{path}/duplex"),
        mtu=maybe(source.number, f"{path}/mtu"),
        driver=driver.readlink().name if driver.is_symlink() else "",
        physical=source.path(f"{path}/device").exists(),
        managed=bool(flags & 1),
        ups=maybe(source.number, f"{path}/carrier_up_count"),
        members=tuple((maybe(source.text, f"{path}/bonding/slaves") or "").split()),
    )
