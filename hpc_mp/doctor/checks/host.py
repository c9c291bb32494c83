"""Checks of the host's name, clock, firewall and Ethernet."""

from collections import Counter
from collections.abc import Iterator

from hpc_mp.base.text import duration, several
from hpc_mp.cluster.node.host import Clock, Firewall, HostName, is_loopback, read_clock, read_firewall, read_name
from hpc_mp.cluster.node.netdev import ETHERNET, NetworkInterface, read_interfaces
from hpc_mp.cluster.node.source import Unavailable
from hpc_mp.doctor.checks.check import Judgement, checks_of

_SKEW_S = 0.1


def own_name(host: HostName) -> Iterator[Judgement]:
    shown = f"{host.name} is {several(list(host.addresses))}" if host.addresses else f"{host.name} has no address"
    outer = [address for address in host.addresses if not is_loopback(address)]
    first_is_loop = bool(host.addresses) and is_loopback(host.addresses[0])
    if outer and not first_is_loop:
        yield Judgement("ok", shown)
    else:
        yield Judgement("warning", f"{shown}: ranks that look up this host's name get "
                        + ("an address that no other host can reach" if host.addresses else "nothing"))


def there_and_back(host: HostName) -> Iterator[Judgement]:
    if host.back is None:
        return
    address, names = host.back
    short = {name.split(".")[0].lower() for name in names}
    good = host.name.split(".")[0].lower() in short
    shown = several(list(names)) if names else "no name"
    yield Judgement("ok" if good or not names else "warning", f"{host.name} is {address}, which is {shown}")


def kept(clock: Clock) -> Iterator[Judgement]:
    off = "" if clock.offset is None else f", {duration(abs(clock.offset))} off"
    if not clock.synchronized:
        yield Judgement("warning", f"{clock.by} follows no other clock{off}")
    else:
        bad = clock.offset is not None and clock.offset > _SKEW_S
        yield Judgement("warning" if bad else "ok", f"{clock.by} keeps it{off}")


def firewall(state: Firewall) -> Iterator[Judgement]:
    for name in state.active:
        yield Judgement("warning", "is on: ranks meet on ports from 10000 to 29999, and NCCL takes any port", name)
    if isinstance(state.closed, Unavailable):
        if not state.active:
            raise state.closed
        return
    for chain in state.closed:
        yield Judgement("warning", "turns away arriving packets that no rule allows", chain)
    if not state.active and not state.closed:
        yield Judgement("ok", "no firewall turns away what arrives")


def carrier(interfaces: tuple[NetworkInterface, ...]) -> Iterator[Judgement]:
    for link in interfaces:
        if link.kind != ETHERNET or not link.managed:
            continue
        down = link.state not in ("up", "unknown") and link.ups != 0  # 0: never had a link, so no cable
        half = link.duplex == "half"
        speed = "" if link.speed is None else f", {link.speed / 1000:g} Gb/s"
        yield Judgement("warning" if down or half else "ok",
                        f"{link.state}{speed}" + (", half duplex" if half else "") + ("; it had a link" if down else ""),
                        link.name)


def speed(interfaces: tuple[NetworkInterface, ...]) -> Iterator[Judgement]:
    """Check that interfaces of one driver have one speed, if there are at least three of them."""
    for driver in sorted({link.driver for link in interfaces if link.driver}):
        alike = [link for link in interfaces if link.driver == driver and link.kind == ETHERNET and link.speed]
        usual = Counter(link.speed or 0 for link in alike).most_common(1)
        for link in alike if len(alike) > 2 else ():
            slow = (link.speed or 0) < usual[0][0]
            yield Judgement("warning" if slow else "ok",
                            f"{(link.speed or 0) / 1000:g} Gb/s; {usual[0][1]} of {len(alike)} with driver {driver} have "
                            f"{usual[0][0] / 1000:g}", link.name)


def mtu(interfaces: tuple[NetworkInterface, ...]) -> Iterator[Judgement]:
    for driver in sorted({link.driver for link in interfaces if link.driver}):
        alike = [link for link in interfaces if link.driver == driver and link.managed and link.state == "up" and link.mtu]
        sizes = Counter((link.kind, link.mtu) for link in alike)
        for link in alike:
            usual = max((count, size or 0) for (kind, size), count in sizes.items() if kind == link.kind)[1]
            odd = link.mtu != usual or (link.mtu or 0) < 1280
            yield Judgement("warning" if odd else "ok",
                            f"MTU {link.mtu}" + (f"; others with driver {driver} have {usual}" if link.mtu != usual else ""),
                            link.name)


CHECKS = (
    *checks_of(read_name, {"dns-own-name": own_name, "dns-back": there_and_back}),
    *checks_of(read_clock, {"clock-sync": kept}),
    *checks_of(read_firewall, {"firewall": firewall}),
    *checks_of(read_interfaces, {"ethernet-link": carrier, "ethernet-speed": speed, "interface-mtu": mtu}),
)
