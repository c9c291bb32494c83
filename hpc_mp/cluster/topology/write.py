"""Writer of topology.conf: a tree, or blocks.

Blocks are for Slurm 24.05 and later: 23.11 has the plug-in, and refuses BlockSizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.cluster.topology import Switch, Topology
from hpc_mp.cluster.topology.model import only, unsound
from hpc_mp.cluster.topology.reading import legal


def to_conf(topology: Topology, header: Sequence[str] = ()) -> str:
    """Return topology.conf of a tree or of blocks, with the header as comments.

    Names are changed if Slurm would not accept them. Switches of a tree with no nodes below them are left out, because Slurm
    before 25.05 does not start with them. Blocks without ``BlockSizes`` get the size of the smallest one. Raises HpcMpError if
    the topology knows no host, or has sizes that Slurm refuses.
    """
    writable = _writable(topology)
    if writable.kind == "block":
        lines = [f"BlockName={block.name}" + (f" Nodes={compress(block.hosts)}" if block.hosts else "")
                 for block in writable.switches]
        lines.append(f"BlockSizes={','.join(map(str, writable.sizes))}")
    else:
        lines = [f"SwitchName={switch.name}" + (f" Switches={compress(switch.children)}" if switch.children else "")
                 + (f" Nodes={compress(switch.hosts)}" if switch.hosts else "") for switch in writable.switches]
    # A comment that ended in a backslash would continue in the next line, which Slurm would then skip.
    comments = [f"# {line}".rstrip("\\") for text in header for line in text.splitlines()]
    return "".join(f"{line}\n" for line in (*comments, *lines))


def _writable(topology: Topology) -> Topology:
    """Return the topology as Slurm accepts it, with legal names. Raises HpcMpError."""
    if not topology.hosts:
        raise HpcMpError("the topology", "has no node under any switch", "use another source, or other --nodes")
    if topology.kind == "block":
        sizes = topology.sizes or (min(len(block.hosts) for block in topology.switches if block.hosts),)
        if (wrong := unsound(sizes)) is not None:
            raise HpcMpError(f"BlockSizes={','.join(map(str, sizes))}", f"{wrong} is not a power of two times {sizes[0]}",
                             "write for example 4,8,16")
        topology = replace(topology, sizes=sizes)
    else:
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
