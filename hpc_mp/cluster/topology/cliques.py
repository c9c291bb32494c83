"""NVLink domains as blocks: nodes whose GPUs have the same ClusterUUID and CliqueId reach each other over NVLink.

``nvidia-smi -q`` prints both under Fabric; a GPU outside any domain has N/A, or a UUID of zeros. Kubernetes' label
nvidia.com/gpu.clique is both, joined by a dot.
"""

import re
from collections.abc import Iterator

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.grouping import grouped
from hpc_mp.cluster.topology import Topology
from hpc_mp.cluster.topology.reading import TopologyReading, group, legal, listed

REMEDY = "pass lines of `node clusteruuid cliqueid`, or lines of nvidia-smi -q with the node before them"
SHORT = 8  # characters of a UUID in the name of a block
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_TABLE = re.compile(rf"(?P<node>[^\s,:]+)\s*[\s,:]\s*(?P<uuid>{_UUID}|N/A)\s*[\s,:.]\s*(?P<clique>\d+|N/A)")
_SMI = re.compile(r"(?P<node>[^\s,:]+):\s+(?P<key>ClusterUUID|CliqueId)\s*:\s*(?P<value>\S+)")
_HEAD = re.compile(r"(node|host(name)?)\b.*(uuid).*(clique)", re.IGNORECASE)

Place = tuple[str, str]  # cluster UUID, clique


def looks_like(text: str) -> bool:
    return any(_TABLE.fullmatch(line.strip()) or _SMI.search(line) for line in text.splitlines())


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
            raise HpcMpError(f"node {node}", f"has {len(uuids)} ClusterUUID and {len(cliques)} CliqueId", REMEDY)
        yield from ((node, place) for place in zip(uuids, cliques, strict=True))
