"""A tree from InfiniBand's own view: leaves are switches with hosts; higher switches join them by distance.

Hosts with several adapters are attached to several leaves (one per rail): hosts at the same set of switches form one leaf of the
tree. A cable at the wrong leaf, or a host at two, neither makes a new leaf nor joins two. A fat tree has more than one way up,
Slurm's tree one: switches of the same distance that are connected below count as one.

The text format is in ibnetdiscover(8): a line ``Switch 36 "S-GUID" # "description" …`` or ``Ca 1 "H-GUID" # "description"``, then
a line per connected port, ``[1] "H-GUID"[1](PORTGUID) # "description" lid 4 4xHDR``.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.grouping import grouped
from hpc_mp.cluster.topology import Switch, Topology
from hpc_mp.cluster.topology.model import TopologyReading, group, legal, listed, natural

_NODE = re.compile(r'(?P<kind>Switch|Ca|Rt)\s+\d+\s+"(?P<id>[SHR]-[0-9a-fA-F]+)"\s*(?:#\s*"(?P<name>[^"]*)")?')
_PORT = re.compile(r'\[\d+\](?:\[[^\]]*\])*(?:\([0-9a-fA-F]+\))?\s+"(?P<id>[SHR]-[0-9a-fA-F]+)"\s*\[\d+\]'
                   r'(?:\[[^\]]*\])*(?:\([0-9a-fA-F]+\))?\s*(?:#\s*"(?P<name>[^"]*)")?')
_ADAPTER = re.compile(r"(HCA-\d+|(mlx|hfi|qib|ib|bnxt|irdma|ionic|cxi|rdma)\w*|\w*mlx\w*)", re.IGNORECASE)
_HOST = re.compile(r"[A-Za-z0-9]([\w-]*[A-Za-z0-9])?")
_MAKER = re.compile(r"mellanox|voltaire|topspin|connectx|infinihost|aggregation node|^MT\d+|openib", re.IGNORECASE)
"""Default descriptions of adapters without a name; ``Aggregation Node`` is a switch's own SHARP engine."""


@dataclass(frozen=True, slots=True)
class IbSubnet:
    """The switches and adapters of a subnet."""

    links: Mapping[str, frozenset[str]]  # switch → attached switches and adapters, by identity ("S-…", "H-…")
    names: Mapping[str, str]  # descriptions by identity


def looks_like(text: str) -> bool:
    return any(_NODE.match(line.strip()) for line in text.splitlines())


def read_fabric(text: str) -> IbSubnet:
    """Parse the text. Raises HpcMpError if it contains no switch."""
    links: dict[str, set[str]] = {}
    names: dict[str, str] = {}
    current = ""
    for line in map(str.strip, text.splitlines()):
        if match := _NODE.match(line):
            current = match["id"]
            if match["kind"] == "Switch":
                links.setdefault(current, set())
        elif current and (match := _PORT.match(line)):
            for end, peer in ((current, match["id"]), (match["id"], current)):
                if end.startswith("S-"):
                    links.setdefault(end, set()).add(peer)
        else:
            continue
        if match["name"]:
            names.setdefault(match["id"], match["name"])
    if not links:
        raise HpcMpError("the text", "names no InfiniBand switch", "pass the output of `ibnetdiscover` without options")
    return IbSubnet({switch: frozenset(ends) for switch, ends in links.items()}, names)


def host_of(description: str) -> str | None:
    """Return the host in a description: ``node018`` of "node018 HCA-1", "node018/mlx5_0" and "node018.site.org mlx5_0". None if
    the description is the maker's own, or the default name of a machine without one."""
    words = [word for word in re.split(r"[\s/:]+", description.strip().strip("'\"")) if word]
    if not words or _MAKER.search(description) or len(words) > 2 or (len(words) == 2 and not _ADAPTER.fullmatch(words[1])):
        return None
    name = words[0].partition(".")[0]
    return name if _HOST.fullmatch(name) and name != "localhost" else None


def switch_name(description: str) -> str | None:
    """Return ``leaf01`` of "MF0;leaf01:MQM8700/U1" and of "leaf01"; None if the description is the maker's own."""
    managed = re.fullmatch(r"[^;]*;([^:;]+):.*", description.strip())
    name = managed[1] if managed else description.strip()
    return name if name and not _MAKER.search(name) else None


# --- the tree ---------------------------------------------------------------------------------------------------------

Leaf = frozenset[str]  # the switches that the hosts of one leaf are attached to


def read_ibnetdiscover(text: str, origin: str) -> TopologyReading:
    """Return the tree. Raises HpcMpError if the text contains no switch."""
    fabric = read_fabric(text)
    at: dict[str, set[str]] = {}
    unnamed = 0
    for switch, ends in fabric.links.items():
        for adapter in (end for end in ends if end.startswith("H-")):
            host = host_of(fabric.names.get(adapter, ""))
            if host is not None:
                at.setdefault(host, set()).add(switch)
            elif "aggregation node" not in fabric.names.get(adapter, "").lower():
                unnamed += 1
    notes = [f"{unnamed} adapters left out: their description names no host"] if unnamed else []
    leaves = _leaves({host: frozenset(switches) for host, switches in at.items()})
    astray = [host for leaf, hosts in leaves.items() for host in hosts if not at[host] <= leaf]
    if astray:
        notes.append(f"{listed(astray)}: connected to switches of several leaves (a misplaced cable, a gateway, or two hosts "
                     "with one name?); placed under the leaf with most of these switches")
    if not leaves:
        words = "no adapter has a host's name: set node descriptions, or run ibnetdiscover with --node-name-map"
        return TopologyReading((), origin, (*notes, words))
    names = _names(fabric)
    taken: list[str] = []
    leaf_names: dict[Leaf, str] = {}
    for leaf in sorted(leaves, key=lambda leaf: natural(min((names[switch] for switch in leaf), key=natural))):
        first = min((names[switch] for switch in leaf), key=natural)
        leaf_names[leaf] = legal(first if len(leaf) == 1 else f"{first}-x{len(leaf)}", taken)
        taken.append(leaf_names[leaf])
    switches = [group(name, leaves[leaf]) for leaf, name in leaf_names.items()]
    switches += _above(fabric, leaf_names, names, taken)
    tree = Topology(kind="tree", switches=tuple(switches), default=True)
    rails = max(map(len, leaves))
    notes += [f"hosts are connected to up to {rails} switches: hosts with the same switches form one leaf"] if rails > 1 else []
    return TopologyReading((tree,), origin, tuple(notes))


def _leaves(at: Mapping[str, Leaf]) -> dict[Leaf, list[str]]:
    """Return hosts by the switches they are attached to, or by those of the leaf they are assigned to."""
    hosts = Counter(at.values())
    homes = {switches: _home(switches, hosts) for switches in hosts}
    leaves: dict[Leaf, list[str]] = {}
    for host, switches in at.items():
        while homes[switches] != switches:
            switches = homes[switches]
        leaves.setdefault(switches, []).append(host)
    return leaves


def _home(own: Leaf, hosts: Mapping[Leaf, int]) -> Leaf:
    """Return the leaf of hosts that are attached to ``own``, because not every set of switches is a leaf.

    If other sets with more hosts contain each of its switches (a cable at the wrong leaf, a gateway at two leaves), it belongs to
    the set with which it shares most. A set that lacks rails belongs to the only wider one.
    """
    larger = _larger(own, hosts)
    if own <= frozenset().union(*larger):
        return min(larger, key=lambda other: (-len(own & other), -hosts[other], sorted(other)))
    wider = [other for other in hosts if own < other and not other <= frozenset().union(*_larger(other, hosts))]
    widest = [other for other in wider if not any(other < third for third in wider)]
    return widest[0] if len(widest) == 1 else own


def _larger(own: Leaf, hosts: Mapping[Leaf, int]) -> list[Leaf]:
    return [other for other, count in hosts.items() if own & other and count > hosts[own]]


def _above(fabric: IbSubnet, leaf_names: Mapping[Leaf, str], names: Mapping[str, str], taken: list[str]) -> list[Switch]:
    """Return the switches above the leaves. Switches at distance k from a host, and what they connect, form the k-th storey.
    Parts that are connected only by cables between switches of one storey, such as the groups of a dragonfly+, are joined
    above them."""
    distance = _distances(fabric, {switch for leaf in leaf_names for switch in leaf})
    below = [(name, leaf) for leaf, name in leaf_names.items()]  # parts so far: the name, and the leaves' switches below
    switches: list[Switch] = []
    for storey, beside in itertools.product(range(max(distance.values(), default=0) + 1), (False, True)):
        usable = {switch for switch, far in distance.items() if far <= storey}
        level = set() if beside else {switch for switch in usable if distance[switch] == storey}
        joined: list[tuple[str, Leaf]] = []
        parts = _parts(fabric, usable, level, [leaf for _, leaf in below])
        of = {switch: number for number, part in enumerate(parts) for switch in part}
        for number, inside in grouped((of[min(leaf)], (name, leaf)) for name, leaf in below).items():
            if len(inside) == 1:
                joined += inside
                continue
            own = [names[switch] for switch in parts[number] if distance.get(switch) == storey > 0]
            name = legal(own[0] if len(own) == 1 else f"tier{storey}", taken)
            taken.append(name)
            switches.append(Switch(name, (), tuple(child for child, _ in inside)))
            joined.append((name, frozenset().union(*(leaf for _, leaf in inside))))
        below = joined
    return switches


def _distances(fabric: IbSubnet, leaves: Iterable[str]) -> dict[str, int]:
    """Return the number of cables from every switch to the nearest leaf."""
    distance = dict.fromkeys(leaves, 0)
    front = list(distance)
    while front:
        reached = dict.fromkeys(end for switch in front for end in fabric.links.get(switch, ()) if end.startswith("S-"))
        front = [switch for switch in reached if switch not in distance]
        distance |= {switch: distance[next(end for end in fabric.links[switch] if end in distance)] + 1 for switch in front}
    return distance


def _parts(fabric: IbSubnet, usable: set[str], apart: set[str], together: Iterable[Leaf]) -> list[set[str]]:
    """Return the parts connected over usable switches, without cables between two of ``apart``, and through multi-homed hosts."""
    parent = {switch: switch for switch in usable}

    def root(switch: str) -> str:
        while parent[switch] != switch:
            parent[switch] = parent[parent[switch]]
            switch = parent[switch]
        return switch

    cables = ((switch, end) for switch in usable for end in fabric.links.get(switch, ())
              if end in usable and not (switch in apart and end in apart))
    hosts = ((min(leaf), switch) for leaf in together for switch in leaf)
    for one, other in itertools.chain(cables, hosts):
        parent[root(one)] = root(other)
    parts: dict[str, set[str]] = {}
    for switch in usable:
        parts.setdefault(root(switch), set()).add(switch)
    return list(parts.values())


def _names(fabric: IbSubnet) -> dict[str, str]:
    """Return the name of every switch: its own if it is unique, else its GUID."""
    labels = {switch: switch_name(fabric.names.get(switch, "")) for switch in fabric.links}
    counts = list(labels.values())
    names: dict[str, str] = {}
    for switch, name in labels.items():
        plain = name if name and counts.count(name) == 1 else f"ib-{switch[2:]}"
        names[switch] = legal(plain, names.values())
    return names
