"""The host's name, its clock, and its firewalls."""

import re
from dataclasses import dataclass

from hpc_mp.cluster.node.source import NodeSource, Unavailable, fields, maybe


@dataclass(frozen=True)
class HostName:
    """The host's name and its resolution."""

    name: str  # the kernel's host name
    addresses: tuple[str, ...]  # addresses that the name service gives for it
    # the first address that is not a loopback, and the names it resolves back to; None if no such address exists
    back: tuple[str, tuple[str, ...]] | None


@dataclass(frozen=True)
class Clock:
    """``by``: the program that keeps it; ``synchronized``: True if it follows a source; ``offset``: seconds; None if unknown."""

    by: str
    synchronized: bool
    offset: float | None


@dataclass(frozen=True)
class Firewall:
    """``active``: firewalls that are on; ``closed``: chains that reject arriving packets, Unavailable without root."""

    active: tuple[str, ...]
    closed: tuple[str, ...] | Unavailable


def read_name(source: NodeSource) -> HostName:
    """Read the host's name. Raises Unavailable if the name service cannot be queried."""
    name = source.text("/proc/sys/kernel/hostname")
    addresses = _lookup(source, ("getent", "ahosts", name))
    outer = next((address for address in addresses if not is_loopback(address) and not address.startswith("fe80:")), None)
    if outer is None:
        return HostName(name, addresses, None)
    return HostName(name, addresses, (outer, _lookup(source, ("getent", "hosts", outer), first=1)))


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def read_clock(source: NodeSource) -> Clock:
    """Read the clock's state. Raises Unavailable if no time daemon reports it."""
    failures = []
    try:
        values = source.answer(("chronyc", "-c", "tracking")).strip().split(",")
        return Clock("chrony", values[0] not in ("", "00000000", "7F7F0101"), abs(float(values[4])))
    except (Unavailable, IndexError, ValueError) as error:
        failures.append(str(error))
    if source.names("/run/systemd/timesync/synchronized"):
        return Clock("systemd-timesyncd", True, None)
    try:
        settings = fields(source.answer(("timedatectl", "show")), "=")
        return Clock("timedatectl", settings.get("NTPSynchronized") == "yes", None)
    except Unavailable as unseen:
        failures.append(str(unseen))
    raise Unavailable("no time synchronisation program answers: " + "; ".join(failures))


def read_firewall(source: NodeSource) -> Firewall:
    active = []
    if fields(maybe(source.text, "/etc/ufw/ufw.conf") or "", "=").get("ENABLED") == "yes":
        active.append("ufw")
    if any(maybe(source.text, path) == "firewalld" for path in source.names("/proc/[0-9]*/comm")):
        active.append("firewalld")
    closed: tuple[str, ...] | Unavailable
    try:
        closed = tuple(f"{table} {chain}" for table, chain in _chains(source.answer(("nft", "list", "ruleset"))))
    except Unavailable as unseen:
        closed = unseen
    return Firewall(tuple(active), closed)


_COUNTED = r"(?:counter packets \d+ bytes \d+ |counter |log (?:prefix \"[^\"]*\" ?)?(?:level \w+ )?)*"
_REFUSES = re.compile(rf"{_COUNTED}(?:drop|reject\b.*|xt target \"(?:REJECT|DROP)\".*)")  # everything
_SENDERS = r"(?P<few>ip6? saddr (?:\{[^}]*\}|\S+) |iif(?:name)? (?:\{[^}]*\}|(?!\"?lo\b)\S+) )?"  # all, a network or an interface
_FOLLOWS = re.compile(rf"{_SENDERS}{_COUNTED}(?:jump|goto) (\S+)")
_LETS_IN = re.compile(rf"{_SENDERS}{_COUNTED}accept")


def _chains(ruleset: str) -> list[tuple[str, str]]:
    """Return (table, chain) of chains for arriving packets that reject everything not allowed and allow no network as a whole."""
    rules: dict[tuple[str, str], list[str]] = {}
    table, chain = "", ""
    for line in map(str.strip, ruleset.splitlines()):
        words = line.split()
        if words[:1] == ["table"]:
            table = " ".join(words[1:-1])
        elif words[:1] == ["chain"]:
            chain = words[1]
        else:
            rules.setdefault((table, chain), []).append(re.sub(r" comment \".*\"$", "", line))

    def lets_in(place: tuple[str, str], depth: int = 8) -> bool | None:
        """Return True if a whole network may pass, False if the rest is turned away, None if the chain leaves that open."""
        for rule in rules.get(place, ()) if depth else ():
            if _LETS_IN.fullmatch(rule) or _REFUSES.fullmatch(rule):
                return bool(_LETS_IN.fullmatch(rule))
            onward = _FOLLOWS.fullmatch(rule)
            inner = lets_in((place[0], onward[2]), depth - 1) if onward else None
            if onward and (inner or (inner is False and not onward["few"])):
                return inner
        return False if any(re.search(r"hook input .*policy drop", rule) for rule in rules.get(place, ())) else None

    return [place for place, lines in rules.items() if any("hook input " in line for line in lines) and lets_in(place) is False]


def _lookup(source: NodeSource, argv: tuple[str, ...], first: int = 0) -> tuple[str, ...]:
    """Return the words of each line from ``first`` on: one address of ``ahosts``, all names of ``hosts``; none if unknown."""
    try:
        lines = [line.split() for line in source.answer(argv).splitlines()]
    except Unavailable as unseen:
        if unseen.code == 2:  # getent's exit code for an unknown entry
            return ()
        raise
    return tuple(dict.fromkeys(word for line in lines for word in (line[first:] if first else line[:1])))
