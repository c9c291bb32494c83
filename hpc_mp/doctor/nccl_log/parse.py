"""Facts from NCCL's log (``NCCL_DEBUG=INFO``): any version, mixed lines of many ranks, prefixed labels, truncated lines. The
meanings of its warnings are the table ``env/nccl-troubles.toml``."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from hpc_mp.base.assets import asset_table

Via = Literal["NET", "P2P", "SHM", "COLLNET"]


@dataclass(frozen=True, slots=True)
class NcclChannel:
    """A path from one rank to another; the log does not name the communicator."""

    number: int
    sender: int  # rank; for CollNet both are the rank that wrote the line
    receiver: int
    via: Via  # NET is the network, P2P direct GPU access (NVLink, PCIe), SHM the host's memory, COLLNET reduction in the switches
    how: str  # the network's name ("IB", "Socket", "AWS Libfabric"), or the kind of access ("CUMEM", "IPC")
    device: int | None = None  # the network's device; None for other paths
    gdr: bool = False  # True if the adapter accesses the GPU's memory directly


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error or warning. ``rank``: the latest rank of the process; None if the log does not contain it."""

    kind: str  # of a row in ``env/nccl-troubles.toml``
    host: str
    rank: int | None
    words: str
    hca: str = ""  # adapter of the process that wrote the line ("mlx5_3"); empty if the line names none
    code: int | None = None  # status of a completion, or errno


@dataclass(frozen=True, slots=True)
class NcclTruth:
    """All parsed facts."""

    lines: int = 0  # number of NCCL's lines
    networks: Mapping[str, int] = field(default_factory=dict)  # number of processes by network: {"IB": 16}
    network_hosts: Mapping[str, frozenset[str]] = field(default_factory=dict)  # hosts by network, to name hosts that deviate
    # adapters that NCCL found, by host: ("mlx5_ib0:1/IB", …); for plain sockets the interfaces
    adapters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gdr: Mapping[str, bool] = field(default_factory=dict)  # True if NCCL found GPUDirect possible, by adapter
    provider: tuple[str, int | None] | None = None  # provider of the OFI plug-in ("efa"), and the number of adapters it found
    channels: tuple[NcclChannel, ...] = ()  # channels without duplicates
    # host by (ranks of a communicator, rank), the latest for communicators of equal size
    hosts: Mapping[tuple[int, int], str] = field(default_factory=dict)
    ranks: int | None = None  # size of the largest communicator; None if the log does not contain it
    nodes: int | None = None  # of that communicator
    started: frozenset[tuple[int, int]] = frozenset()  # (ranks, rank) of starts in the log
    completed: frozenset[tuple[int, int]] = frozenset()  # and of completed starts
    environment: Mapping[str, str] = field(default_factory=dict)  # NCCL's variables that were set, with their values
    troubles: tuple[Trouble, ...] = ()  # errors and warnings without duplicates

    def between_nodes(self, channel: NcclChannel) -> bool:
        """Return True for a path over the network. NCCL rarely uses it inside a node too: that is assumed only for one node."""
        return channel.via in ("NET", "COLLNET") and self.nodes != 1

    def inside(self, channel: NcclChannel) -> bool:
        """Return True if both ranks are on one node. (MNNVL is NVLink between nodes.)"""
        return channel.how != "MNNVL" and not self.between_nodes(channel)


TABLE = "env/nccl-troubles.toml"
UNKNOWN = "warning"  # kind of the warnings that match no other row
ENDED = "ended"  # kind of those after which NCCL's call returned an error


@cache
def trouble_rows() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows by kind, in order, as the table's head explains them; ``signs`` and ``place`` are compiled patterns."""
    rows = asset_table(TABLE)["trouble"]
    return {row["kind"]: {"means": "", "info": False, "fabrics": [], **row, "place": re.compile(row.get("place", "(?!)")),
                          "signs": re.compile("|".join(f"(?:{sign})" for sign in row["signs"]))} for row in rows}


def trouble_of(place: str, level: str, text: str) -> str | None:
    """Return the kind of a message; None if it is only informative."""
    return next((kind for kind, row in trouble_rows().items() if (level == "WARN" or row["info"])
                 and (row["signs"].search(text) or row["place"].search(place))), None)


LONGEST = 4096  # parsed characters of a line; NCCL's own lines have at most 1024 plus their messages' additions
MOST_WARNINGS = 200  # kept warnings without a known meaning
_PREFIX = re.compile(r"(?<![\w.-])([A-Za-z0-9][\w.-]*):(\d+):(\d+) \[(-?\d+)\] (?:([^\[\]\n]{1,300}?):\d+ (?:\(\w+\) )?)?NCCL "
                     r"(INFO|WARN) ")  # a plug-in writes its function with arguments in the place of NCCL's file
_ADAPTER = re.compile(r"\[\d+\] ?([\w.@-]+:\d+(?:::?\d+)?/\w+)")
_INTERFACE = re.compile(r"\[\d+\]([\w.@-]+):")
_STATUS = re.compile(r"(?:status=(?:\w+\()?|with (?:error|status) )(\d+)")
_RETURN = re.compile(r"\S+:\d+ -> (\d+)(?: |$)")  # a function hands an error to its caller: NCCL's trace of the call
_NO_ERRORS = ("0", "7")  # ncclSuccess, ncclInProgress
_HCA = re.compile(r"\bhca (\S+)|\bon dev ([\w.-]+):\d|NET/IB : ([\w.-]+):\d+ ")


class Who(NamedTuple):
    """The process that wrote a line."""

    host: str
    process: str
    device: str


def parse(lines: Iterable[str]) -> NcclTruth:
    """Parse all facts in ``lines``. Never raises because of their content."""
    reading = _Reading()
    for line in lines:
        if "NCCL" in line:
            reading.line(line[:LONGEST])
    return reading.truth()


class _Reading:
    def __init__(self) -> None:
        self.count = 0
        self.network: dict[Who, str] = {}
        self.adapters: dict[str, tuple[str, ...]] = {}
        self.gdr: dict[str, bool] = {}
        self.provider: tuple[str, int | None] | None = None
        self.channels: dict[NcclChannel, None] = {}
        self.hosts: dict[tuple[int, int], str] = {}
        self.place: dict[Who, tuple[int, int]] = {}  # (ranks, rank) in the communicator that a process last named
        self.shape: dict[int, int] = {}  # nodes by ranks
        self.started: set[tuple[int, int]] = set()
        self.completed: set[tuple[int, int]] = set()
        self.environment: dict[str, str] = {}
        self.troubles: dict[Trouble, None] = {}
        self.warnings = 0
        self.unknown: dict[tuple[Who, str], list[Trouble]] = {}  # by thread: unknown warnings of its latest lines
        self.ended: dict[Who, list[Trouble]] = {}

    def line(self, line: str) -> None:
        for who, thread, place, level, text in _messages(line):
            self.count += 1
            meant = False
            for sign, pattern, take in _MEANINGS:
                if sign in text and (match := pattern.search(text)):
                    take(self, who, match)
                    meant = True
            if not meant and text.strip() and (kind := trouble_of(place, level, text)):
                self.trouble(kind, who, thread, text)
            elif level == "INFO":
                self.returns(who, self.unknown.pop((who, thread), []), text)

    def trouble(self, kind: str, who: Who, thread: str, text: str) -> None:
        rank = self.place[who][1] if who in self.place else None
        status, hca = _STATUS.search(text), _HCA.search(text)
        trouble = Trouble(kind, who.host, rank, text.strip()[:300], next(filter(None, hca.groups())) if hca else "",
                          int(status[1]) if status else None)
        if kind == UNKNOWN:
            self.warnings += 1
            self.unknown[who, thread] = [*self.unknown.get((who, thread), [])[-3:], trouble]
            if self.warnings > MOST_WARNINGS:
                return
        self.troubles[trouble] = None

    def returns(self, who: Who, before: list[Trouble], text: str) -> None:
        """Take the warnings ``before`` a trace of the call for what ended it, if the trace has an error's number."""
        if not before or not (match := _RETURN.match(text)) or match[1] in _NO_ERRORS:
            return
        fatal = self.ended.setdefault(who, [])
        for trouble in before:
            self.troubles.pop(trouble, None)
            if len(fatal) < MOST_WARNINGS and trouble not in fatal:
                fatal.append(trouble)

    def _network(self, who: Who, match: re.Match[str]) -> None:
        self.network[who] = match[1].strip()

    def _adapters(self, who: Who, match: re.Match[str]) -> None:
        names = _ADAPTER.findall(match[2]) or _INTERFACE.findall(match[2])
        if names:
            self.adapters[who.host] = tuple(names)

    def _no_adapter(self, who: Who, match: re.Match[str]) -> None:
        self.adapters.setdefault(who.host, ())

    def _gdr(self, who: Who, match: re.Match[str]) -> None:
        self.gdr[match[2]] = match[1] == "Enabled"

    def _provider(self, who: Who, match: re.Match[str]) -> None:
        self.provider = (match[1], int(match[2]) if match[2] else None)

    def _channel(self, who: Who, match: re.Match[str]) -> None:
        via, how, device, gdr = _way(match[4])
        if via is not None:
            self.channels[NcclChannel(int(match[1]), int(match[2]), int(match[3]), via, how, device, gdr)] = None

    def _coll_net(self, who: Who, match: re.Match[str]) -> None:
        _, how, device, gdr = _way(f"NET/{match[3]}")
        self.channels[NcclChannel(int(match[1]), int(match[2]), int(match[2]), "COLLNET", how, device, gdr)] = None

    def _rank(self, who: Who, match: re.Match[str]) -> None:
        rank, ranks = int(match[1]), int(match[2])
        if rank < ranks:
            self.place[who] = (ranks, rank)
            self.hosts[ranks, rank] = who.host

    def _start(self, who: Who, match: re.Match[str]) -> None:
        self._rank(who, match)
        if who in self.place:
            (self.started if match[3] == "START" else self.completed).add(self.place[who])
        if match[3] == "COMPLETE":  # NCCL went on without what failed before
            self.troubles.update(dict.fromkeys(self.ended.pop(who, [])))

    def _nodes(self, who: Who, match: re.Match[str]) -> None:
        self._rank(who, match)
        self.shape[int(match[2])] = int(match[3])

    def _set(self, who: Who, match: re.Match[str]) -> None:
        self.environment[match[1]] = match[2].strip().rstrip(".")

    def _count_nodes(self, ranks: int) -> int | None:
        """Count the nodes of a communicator if all its ranks wrote lines: older versions do not log the number."""
        hosts = [self.hosts.get((ranks, rank)) for rank in range(ranks)] if ranks <= len(self.hosts) else [None]
        return None if None in hosts else len(set(hosts))

    def truth(self) -> NcclTruth:
        hosts = defaultdict(set)
        for who, name in self.network.items():
            hosts[name].add(who.host)
        ranks = max((ranks for ranks, _ in self.started | self.completed | set(self.place.values())), default=None)
        ended = dict.fromkeys(replace(trouble, kind=ENDED) for troubles in self.ended.values() for trouble in troubles)
        return NcclTruth(
            lines=self.count, networks=dict(Counter(self.network.values())),
            network_hosts={name: frozenset(names) for name, names in hosts.items()}, adapters=self.adapters, gdr=self.gdr,
            provider=self.provider, channels=tuple(self.channels), hosts=self.hosts, ranks=ranks,
            nodes=None if ranks is None else self.shape.get(ranks) or self._count_nodes(ranks), started=frozenset(self.started),
            completed=frozenset(self.completed), environment=self.environment, troubles=(*self.troubles, *ended))


def _messages(line: str) -> Iterator[tuple[Who, str, str, str, str]]:
    """Yield NCCL's messages of a line, with thread, place in NCCL's source and level: usually one, several if the lines of
    ranks are mixed."""
    starts = list(_PREFIX.finditer(line))
    ends = [*(start.start() for start in starts), len(line)][1:]
    for start, end in zip(starts, ends, strict=True):
        yield Who(start[1], start[2], start[4]), start[3], start[5] or "", start[6], line[start.end():end].rstrip()


def _way(text: str) -> tuple[Via | None, str, int | None, bool]:
    """Parse ``NET/IB/0(3)/GDRDMA(PCI)/Shared`` into the kind, its name, the device, and True for GPUDirect."""
    if text.startswith("direct shared memory"):  # until 2.11
        return "SHM", "direct", None, False
    parts = text.split("/")
    if parts[0] == "NET" and len(parts) > 2 and (device := re.match(r"\d+", parts[2])):
        return "NET", parts[1], int(device[0]), any(part.startswith("GDRDMA") for part in parts[3:])
    if parts[0] in ("P2P", "SHM") and len(parts) > 1 and parts[1]:
        return ("P2P" if parts[0] == "P2P" else "SHM"), parts[1].split()[0] if parts[1].split() else "", None, False
    return None, "", None, False


# (substring of every such message, pattern of the message, handler)
_MEANINGS: tuple[tuple[str, re.Pattern[str], Callable[[_Reading, Who, re.Match[str]], None]], ...] = tuple(
    (sign, re.compile(pattern), take) for sign, pattern, take in (
        (" via ", r"^(?:Channel|Ring) (\d+)(?:/\d+)? : (\d+)(?:\[\w+\])? -> (\d+)(?:\[\w+\])?(?: \[\w+\])? via (\S.*)$",
         _Reading._channel),
        ("COLLNET", r"^CollNet (\d+)/?\d* : (\d+) \[\w+\] via COLLNET/(\S.*)$", _Reading._coll_net),
        ("Using network", r"^Using network (\S.*)$", _Reading._network),
        (": Using", r"^NET/(IB|Socket|FastSocket)\w* : Using (.*)$", _Reading._adapters),
        ("No device found", r"^NET/IB : No device found", _Reading._no_adapter),
        ("GPU Direct RDMA", r"GPU Direct RDMA (Enabled|Disabled) for HCA \d+ '([^']*)'", _Reading._gdr),
        ("NET/OFI", r"NET/OFI Selected [Pp]rovider is ([\w-]+).*?(?:\(found (\d+) nics\))?$", _Reading._provider),
        ("nNodes", r"comm \S+ rank (\d+) nRanks (\d+) nNodes (\d+) ", _Reading._nodes),
        ("Init ", r"comm \S+ rank (\d+) nranks (\d+) .*Init (START|COMPLETE)", _Reading._start),
        ("set by environment", r"\b(NCCL_\w+) set by environment to (.*)$", _Reading._set),
    ))
