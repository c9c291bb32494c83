"""Writers of topology.conf (a tree, or blocks) and topology.yaml (Slurm 25.05).

Blocks are for Slurm 24.05 and later: 23.11 has the plug-in, and refuses BlockSizes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import yaml

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.cluster.topology import Switch, Topology
from hpc_mp.cluster.topology.model import legal, only, unsound


def to_conf(topology: Topology, header: Sequence[str] = ()) -> str:
    """Return topology.conf of a tree or of blocks. Names are changed if Slurm would not accept them. Switches of a tree with no
    nodes below them are left out, because Slurm before 25.05 does not start with them. Blocks without ``BlockSizes`` get the size
    of the smallest one. Raises HpcMpError if the topology knows no host, or has sizes that Slurm refuses."""
    writable = _writable(topology)
    if writable.kind == "block":
        lines = [f"BlockName={block.name}" + (f" Nodes={compress(block.hosts)}" if block.hosts else "")
                 for block in writable.switches]
        lines.append(f"BlockSizes={','.join(map(str, writable.sizes))}")
    else:
        lines = [f"SwitchName={switch.name}" + (f" Switches={compress(switch.children)}" if switch.children else "")
                 + (f" Nodes={compress(switch.hosts)}" if switch.hosts else "") for switch in writable.switches]
    return "".join(f"{line}\n" for line in (*_comments(header), *lines))


def to_yaml(topologies: Sequence[Topology], header: Sequence[str] = ()) -> str:
    """Return topology.yaml with one or several topologies. Raises HpcMpError if two have the same name, or one cannot be written.
    """
    names = [topology.name for topology in topologies]
    if len(set(names)) < len(names):
        raise HpcMpError(f"topologies {', '.join(names)}", "two have the same name", "rename one: partitions refer to names")
    entries = [_entry(_writable(topology) if topology.kind != "flat" or topology.unread else topology) for topology in topologies]
    text = yaml.safe_dump(entries, sort_keys=False, default_flow_style=False, width=1_000_000)
    return "".join(f"{line}\n" for line in _comments(header)) + text


def _entry(topology: Topology) -> dict[str, Any]:
    entry: dict[str, Any] = {"topology": topology.name, "cluster_default": topology.default}
    if topology.kind == "block":
        blocks = [{"block": block.name} | ({"nodes": compress(block.hosts)} if block.hosts else {})
                  for block in topology.switches]
        return entry | {"block": {"block_sizes": list(topology.sizes), "blocks": blocks}}
    if topology.kind == "ring":
        return entry | {"ring": {"rings": [{"ring": ring.name, "nodes": compress(ring.hosts)} for ring in topology.switches]}}
    if topology.kind == "flat":
        return entry | {"flat": True}
    return entry | {"tree": {"switches": [
        {"switch": switch.name} | ({"children": compress(switch.children)} if switch.children else {})
        | ({"nodes": compress(switch.hosts)} if switch.hosts else {}) for switch in topology.switches]}}


def _comments(header: Iterable[str]) -> list[str]:
    """Return the header as comments. A line that ended in a backslash would continue in the next, which Slurm would then skip."""
    return [f"# {line}".rstrip("\\") for text in header for line in text.splitlines()]


def _writable(topology: Topology) -> Topology:
    """Return the topology as Slurm accepts it, with legal names. Raises HpcMpError."""
    if topology.unread:
        raise HpcMpError(f"topology {topology.name}", f"has {topology.unread}, which is not read and would be lost",
                         "remove that topology from the source, and add it to the result by hand")
    if not topology.hosts:
        raise HpcMpError("the topology", "has no node under any switch", "use another source, or other --nodes")
    if topology.kind == "block":
        sizes = topology.sizes or (min(len(block.hosts) for block in topology.switches if block.hosts),)
        if (wrong := unsound(sizes)) is not None:
            raise HpcMpError(f"BlockSizes={','.join(map(str, sizes))}", f"{wrong} is not a power of two times {sizes[0]}",
                             "write for example 4,8,16")
        topology = replace(topology, sizes=sizes)
    elif topology.kind == "tree":
        topology = only(topology, topology.hosts)
    names: dict[str, str] = {}
    for switch in topology.switches:
        names[switch.name] = legal(switch.name, names.values())
    written: list[Switch] = []
    for switch in topology.switches:
        name, children = names[switch.name], tuple(names[child] for child in switch.children if child in names)
        if children and switch.hosts:  # Slurm accepts switches or nodes: its own nodes get a leaf below it
            leaf = legal(f"{name}-nodes", names.values())
            names[f"{switch.name} nodes"] = leaf
            written += [Switch(leaf, switch.hosts), Switch(name, (), (*children, leaf))]
        else:
            written.append(Switch(name, switch.hosts, children))
    return replace(topology, joined=(), switches=tuple(written))
