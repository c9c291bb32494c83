"""Conversion of a topology to another kind: blocks as a tree, leaves as blocks, or only some nodes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.cluster.topology import Switch, Topology
from hpc_mp.cluster.topology.reading import legal


def as_tree(topology: Topology) -> Topology:
    """Convert to a tree: blocks and rings become leaves, joined blocks the switches above them, with a root above all.

    Without the root Slurm would start no job across them; nodes of two NVLink domains or rings do reach each other. A tree is
    returned unchanged: without a root, its parts may be separate fabrics. Switches without nodes below them are left out, because
    Slurm before 25.05 does not start with them.
    """
    if topology.kind == "tree" or not topology.switches:
        return _peopled(replace(topology, kind="tree"))
    chains = [(switch, topology.tree.above.get(next(iter(switch.hosts), ""), (switch.name,))) for switch in topology.switches]
    below: dict[str, dict[str, None]] = {}
    for _, chain in chains:
        for child, parent in itertools.pairwise(chain):
            below.setdefault(parent, {})[child] = None
    names: dict[str, str] = {}
    for name in (*(switch.name for switch in topology.switches), *below):
        names[name] = legal(name, names.values())
    switches = [Switch(names[switch.name], switch.hosts) for switch in topology.switches]
    switches += [Switch(names[name], (), tuple(names[child] for child in children)) for name, children in below.items()]
    tops = tuple(dict.fromkeys(names[chain[-1]] for _, chain in chains))
    if len(tops) > 1:
        switches.append(Switch(legal("root", names.values()), (), tops))
    return _peopled(replace(topology, kind="tree", switches=tuple(switches), sizes=(), joined=()))


def as_block(topology: Topology, sizes: Sequence[int] = ()) -> Topology:
    """Convert leaves to blocks, in the order of the tree, so that joined blocks are neighbours there.

    A block without nodes keeps its place, because joined blocks are determined by position. Raises HpcMpError if a size is not a
    power of two times the first, or a block has fewer nodes than the first size. ``sizes``: ``BlockSizes``; default: the
    topology's, else the size of the smallest block.
    """
    leaves = [Switch(switch.name, switch.hosts) for switch in _in_order(topology) if switch.hosts or topology.kind == "block"]
    peopled = [leaf for leaf in leaves if leaf.hosts]
    if not peopled:
        return replace(topology, kind="block", switches=(), sizes=tuple(sizes), joined=())
    block_sizes = tuple(sizes) or topology.sizes or (min(len(leaf.hosts) for leaf in peopled),)
    setting = f"BlockSizes={','.join(map(str, block_sizes))}"
    if (wrong := unsound(block_sizes)) is not None:
        raise HpcMpError(setting, f"{wrong} is not a power of two times {block_sizes[0]}", "write for example 4,8,16")
    small = [leaf.name for leaf in peopled if len(leaf.hosts) < block_sizes[0]]
    if small and sizes:
        raise HpcMpError(setting, f"{compress(small)} has fewer nodes than {block_sizes[0]}",
                         "use a smaller first size, or leave its nodes out with --nodes")
    return replace(topology, kind="block", switches=tuple(leaves), sizes=block_sizes, joined=())


def unsound(sizes: Sequence[int]) -> int | None:
    """Return the first of BlockSizes with which Slurm does not start; None if it accepts all."""
    for size in sizes:
        times, rest = divmod(size, sizes[0]) if sizes[0] else (0, 1)
        if rest or times & (times - 1) or not times:
            return size
    return None


def only(topology: Topology, nodes: Collection[str]) -> Topology:
    """Return the topology without other hosts, and without switches that then have nothing below them. With several block
    sizes each block keeps its place."""
    remaining = {switch.name: tuple(host for host in switch.hosts if host in nodes) for switch in topology.switches}
    alive = {name for name, hosts in remaining.items() if hosts or (topology.kind == "block" and len(topology.sizes) > 1)}
    for _ in topology.switches:  # a tree is at most as deep as its number of switches
        parents = {switch.name for switch in topology.switches if alive.intersection(switch.children)}
        if parents <= alive:
            break
        alive |= parents
    return replace(topology, joined=(), switches=tuple(
        Switch(switch.name, remaining[switch.name], tuple(child for child in switch.children if child in alive))
        for switch in topology.switches if switch.name in alive))


def _peopled(tree: Topology) -> Topology:
    return only(tree, frozenset(tree.hosts))


def _in_order(topology: Topology) -> list[Switch]:
    """Return the switches, with the children of one switch side by side."""
    by_name = {switch.name: switch for switch in topology.switches}
    order: dict[str, Switch] = {}

    def visit(name: str) -> None:
        if name in by_name and name not in order:
            order[name] = by_name[name]
            for child in by_name[name].children:
                visit(child)

    for top in (*topology.tops, *by_name):
        visit(top)
    return list(order.values())
