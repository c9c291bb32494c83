"""``azslurm topology`` of CycleCloud: scale sets (-v), a tree by SHARP (-f), blocks by NVLink domain (-n).

It is Slurm's format with one exception: 4.0.9 names a block ``block_UUID CLIQUE``, with a blank, which Slurm refuses.
"""

import re
from dataclasses import replace

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.topology import read_topologies
from hpc_mp.cluster.topology.reading import TopologyReading, group, listed

_ENTRY = re.compile(r"(?P<out>#?)\s*(?P<key>SwitchName|BlockName)=(?P<name>.*?)\s+(?P<rest>(?:Nodes|Switches)=\S+)\s*")
_MARK = re.compile(r"^# (Number of Nodes in (sw|block)|Total number of blocks|ClusterUUID and CliqueID)", re.I | re.M)
UNKNOWN = "block_unknown"
PLAIN = "htc"  # the "switch" of nodes in no placement group


def looks_like(text: str) -> bool:
    return bool(_MARK.search(text)) or f"SwitchName={PLAIN} " in text


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
