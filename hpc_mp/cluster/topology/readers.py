"""Sources of a topology, and the recognition of their formats."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bandwidth import LinkRates, of_document
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.cluster.topology import Topology, azslurm, cliques, ibnetdiscover, read_topologies
from hpc_mp.cluster.topology.inferred import read_measured_topology
from hpc_mp.cluster.topology.model import unsound
from hpc_mp.cluster.topology.reading import TopologyReading, listed


@dataclass(frozen=True, slots=True)
class TopologyFormat:
    """A format. ``looks_like`` recognises its text, ``read`` takes the text and its origin."""

    looks_like: Callable[[str], bool]
    read: Callable[[str, str], TopologyReading]


def read(text: str, where: str, kind: str | None = None) -> TopologyReading:
    """Read a topology from a text, with notes for its use by Slurm. Raises HpcMpError if it is of no kind, or not of this one.
    ``where``: name of the text for the header: a file's name, a command. ``kind``: of ``SOURCES``; default: recognised from the
    text."""
    recognized = kind or next((name for name, source in SOURCES.items() if source.looks_like(text)), None)
    if recognized is None:
        raise HpcMpError(where, "is not in a known format", f"name the format with --from: {', '.join(SOURCES)}")
    reading = SOURCES[recognized].read(text, f"{recognized} ({where})")
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


SOURCES = {
    "measured": TopologyFormat(lambda text: text.lstrip().startswith("{") and '"pairs"' in text,
                               lambda text, origin: read_measured_topology(rates(text, origin), origin)),
    "ibnetdiscover": TopologyFormat(ibnetdiscover.looks_like, ibnetdiscover.read_ibnetdiscover),
    "azslurm": TopologyFormat(azslurm.looks_like, azslurm.read_azslurm),
    "slurm": TopologyFormat(lambda text: bool(re.search(r"^\s*(-\s+topology:|\w+=)", text, re.MULTILINE)),
                            lambda text, origin: TopologyReading(read_topologies(text), origin)),
    "cliques": TopologyFormat(cliques.looks_like, cliques.read_cliques),
}
