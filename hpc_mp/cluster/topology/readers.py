"""Sources of a topology, and the recognition of their formats."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.grouping import grouped
from hpc_mp.cluster.bandwidth import LinkRates, of_document
from hpc_mp.cluster.slurm.nodelist import compress, expand
from hpc_mp.cluster.topology import Topology, read_topologies
from hpc_mp.cluster.topology.ibnetdiscover import looks_like, read_ibnetdiscover
from hpc_mp.cluster.topology.inferred import read_measured_topology
from hpc_mp.cluster.topology.model import TopologyReading, group, legal, listed, unsound

# --- azslurm ---------------------------------------------------------------------------------------------------------

# ``azslurm topology`` of CycleCloud: scale sets (-v), a tree by SHARP (-f), blocks by NVLink domain (-n). It is Slurm's format
# with one exception: 4.0.9 names a block ``block_UUID CLIQUE``, with a blank, which Slurm refuses.
_ENTRY = re.compile(r"(?P<out>#?)\s*(?P<key>SwitchName|BlockName)=(?P<name>.*?)\s+(?P<rest>(?:Nodes|Switches)=\S+)\s*")
_MARK = re.compile(r"^# (Number of Nodes in (sw|block)|Total number of blocks|ClusterUUID and CliqueID)", re.I | re.M)
UNKNOWN = "block_unknown"
PLAIN = "htc"  # the "switch" of nodes in no placement group


def read_azslurm(text: str, origin: str) -> TopologyReading:
    """Return its tree or its blocks, with notes on what it left out. Raises HpcMpError if it is in neither form."""
    lines, notes = [], []
    for line in text.splitlines():
        match = _ENTRY.fullmatch(line.strip())
        if match is None:
            lines.append(line)
        elif match["out"]:
            notes.append(f"{_nodes(match['rest'])}: left out by azslurm, a block of fewer nodes than BlockSizes")
        elif match["name"] == UNKNOWN:
            notes.append(f"{_nodes(match['rest'])}: in no NVLink domain, so in no block")
        else:
            lines.append(f"{match['key']}={'_'.join(match['name'].split())} {match['rest']}")
    has_entries = any(_ENTRY.fullmatch(line.strip()) for line in lines)  # only BlockSizes remains if no block is large enough
    topologies = tuple(
        replace(topology, switches=tuple(replace(switch, hosts=group("", switch.hosts).hosts) for switch in topology.switches))
        for topology in read_topologies("\n".join(lines) if has_entries or not notes else ""))
    if any(switch.name == PLAIN for topology in topologies for switch in topology.switches):
        notes.append(f"{PLAIN}: nodes outside of placement groups, which share no InfiniBand")
    return TopologyReading(topologies, origin, tuple(notes))


def _nodes(rest: str) -> str:
    try:
        return listed(expand(rest.partition("=")[2]))
    except HpcMpError:
        return rest


# --- NVLink domains as blocks ----------------------------------------------------------------------------------------

# Nodes whose GPUs have the same ClusterUUID and CliqueId reach each other over NVLink. ``nvidia-smi -q`` prints both, under
# Fabric; a GPU outside any domain has N/A, or a UUID of zeros. Kubernetes' label nvidia.com/gpu.clique is both, joined by a dot.
REMEDY = "pass lines of `node clusteruuid cliqueid`, or lines of nvidia-smi -q with the node before them"
SHORT = 8  # characters of a UUID in the name of a block
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_TABLE = re.compile(rf"(?P<node>[^\s,:]+)\s*[\s,:]\s*(?P<uuid>{_UUID}|N/A)\s*[\s,:.]\s*(?P<clique>\d+|N/A)")
_SMI = re.compile(r"(?P<node>[^\s,:]+):\s+(?P<key>ClusterUUID|CliqueId)\s*:\s*(?P<value>\S+)")
_HEAD = re.compile(r"(node|host(name)?)\b.*(uuid).*(clique)", re.IGNORECASE)

Place = tuple[str, str]  # cluster UUID, clique


def read_cliques(text: str, origin: str) -> TopologyReading:
    """Return blocks of the nodes that share a domain, the largest first. Their size is that of the smallest. Raises HpcMpError
    for text in neither form."""
    places: dict[str, dict[Place, None]] = {}
    for node, place in _lines(text):
        places.setdefault(node, {})[place[0].lower(), place[1]] = None
    if not places:
        raise HpcMpError("the text", "has no node's ClusterUUID and CliqueId", REMEDY)
    torn = [node for node, domains in places.items() if len(domains) > 1]
    outside = [node for node, domains in places.items() if len(domains) == 1 and not _domain(next(iter(domains)))]
    members = grouped((next(iter(domains)), node) for node, domains in places.items()
                      if node not in torn and node not in outside)
    notes = [f"{listed(nodes)}: {why}" for nodes, why in (
        (outside, "in no NVLink domain, so in no block"),
        (torn, "its GPUs report more than one domain (`hpc-mp doctor` there: gpu-clique), so in no block")) if nodes]
    blocks, names = [], list[str]()
    for (uuid, clique), nodes in sorted(members.items(), key=lambda item: (-len(item[1]), item[0])):
        names.append(legal(f"nvl-{uuid[:SHORT]}-{clique}", names))
        blocks.append(group(names[-1], nodes))
    sizes = (min(len(block.hosts) for block in blocks),) if blocks else ()
    topologies = (Topology(kind="block", switches=tuple(blocks), sizes=sizes, default=True),) if blocks else ()
    return TopologyReading(topologies, origin, tuple(notes))


def _domain(place: Place) -> bool:
    return "n/a" not in place and "N/A" not in place and bool(place[0].strip("0-"))


def _lines(text: str) -> Iterator[tuple[str, Place]]:
    """Yield one pair per GPU from a table, and from ``node: CliqueId : 1`` and ``node: ClusterUUID : …``."""
    halves: dict[tuple[str, str], list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if match := _TABLE.fullmatch(content):
            yield match["node"], (match["uuid"], match["clique"])
        elif match := _SMI.search(content):
            halves.setdefault((match["node"], match["key"]), []).append(match["value"])
        elif content and not _HEAD.match(content) and not re.match(r"[^\s,:]+:", content):
            raise HpcMpError(f"line {number}, {content[:100]!r}", "has no node's ClusterUUID and CliqueId", REMEDY)
    for node in dict.fromkeys(node for node, _ in halves):
        uuids, cliques = (halves.get((node, key), []) for key in ("ClusterUUID", "CliqueId"))
        if len(uuids) != len(cliques):
            raise HpcMpError(f"node {node[:100]}", f"has {len(uuids)} ClusterUUID and {len(cliques)} CliqueId", REMEDY)
        yield from ((node, place) for place in zip(uuids, cliques, strict=True))


# --- all sources -----------------------------------------------------------------------------------------------------


def read(text: str, where: str, kind: str | None = None) -> TopologyReading:
    """Read a topology from a text, with notes for its use by Slurm. Raises HpcMpError if it is of no kind, or not of this one.
    ``where``: name of the text for the header: a file's name, a command. ``kind``: of ``SOURCES``; default: recognised from the
    text."""
    recognized = kind or next((name for name, (looks_like, _) in SOURCES.items() if looks_like(text)), None)
    if recognized is None:
        raise HpcMpError(where, "is not in a known format", f"name the format with --from: {', '.join(SOURCES)}")
    reading = SOURCES[recognized][1](text, f"{recognized} ({where})")
    for topology in reading.topologies:
        _ = topology.tree  # raises if a switch is above itself
    notes = [note for topology in reading.topologies for note in (_apart(topology), *amiss(topology)) if note]
    return replace(reading, notes=(*reading.notes, *notes))


def amiss(topology: Topology) -> Iterator[str]:
    """Yield the parts that Slurm does not accept, or reads differently than written."""
    names = {switch.name for switch in topology.switches}
    for switch in topology.switches:
        gone = [child for child in switch.children if child not in names]
        if gone:
            yield f"{switch.name} is above {compress(gone)}, which is not defined: Slurm refuses that"
        if switch.children and switch.hosts and topology.kind == "tree":
            yield f"{switch.name} has both switches and nodes: Slurm refuses that"
    if (wrong := unsound(topology.sizes)) is not None:
        yield f"BlockSizes has {wrong}, which is not a power of two times {topology.sizes[0]}: Slurm refuses that"
    homes = Counter(host for switch in topology.switches if not switch.children for host in set(switch.hosts))
    several = [host for host, count in homes.items() if count > 1]
    if several:
        what = "leaves" if topology.kind == "tree" else f"{topology.kind}s"
        yield f"{listed(several)}: in several {what}; the first counts here"
    if topology.unread:
        yield f"{topology.name} has {topology.unread}, which defines no switches and is ignored"


def _apart(topology: Topology) -> str | None:
    if topology.kind != "tree" or not topology.apart:
        return None
    return f"no switch is above {compress(topology.apart)}: Slurm starts no job across them"


def rates(text: str, where: str) -> LinkRates:
    """Read cluster.json. Raises HpcMpError if it is malformed."""
    try:
        return of_document(json.loads(text))
    except (ValueError, KeyError, TypeError):
        raise HpcMpError(where, "is not a cluster.json that a survey of hpc-mp doctor wrote",
                         "run `hpc-mp doctor cluster --nodes N`, and use the file that it writes") from None


# The formats: what recognises a text of it, and what reads the text and its origin.
SOURCES: dict[str, tuple[Callable[[str], bool], Callable[[str, str], TopologyReading]]] = {
    "measured": (lambda text: text.lstrip().startswith("{") and '"pairs"' in text,
                 lambda text, origin: read_measured_topology(rates(text, origin), origin)),
    "ibnetdiscover": (looks_like, read_ibnetdiscover),
    "azslurm": (lambda text: bool(_MARK.search(text)) or f"SwitchName={PLAIN} " in text, read_azslurm),
    "slurm": (lambda text: bool(re.search(r"^\s*(-\s+topology:|\w+=)", text, re.MULTILINE)),
              lambda text, origin: TopologyReading(read_topologies(text), origin)),
    "cliques": (lambda text: any(_TABLE.fullmatch(line.strip()) or _SMI.search(line) for line in text.splitlines()),
                read_cliques),
}
