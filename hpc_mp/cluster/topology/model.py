"""Switches between hosts: the switches above each host, a topology as in Slurm's files (a tree, or blocks), and the result of
reading a source about it."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.nodelist import compress


@dataclass(frozen=True, slots=True)
class SwitchTree:
    """The switches above every host. ``above``: host → its switches, the leaf first, the root last; empty if nothing is known."""

    above: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def leaf(self, host: str) -> str | None:
        """Return the leaf switch (block, ring) of a host; None if the topology does not name the host."""
        return next(iter(self.above.get(host, ())), None)


@dataclass(frozen=True, slots=True)
class Switch:
    """One line of a topology: a switch with the switches and hosts directly below it. Hosts of its children may be repeated."""

    name: str
    hosts: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


def from_switches(switches: Sequence[Switch]) -> SwitchTree:
    """Return the tree of switches. A host that several switches name belongs to the first without children, else to the first.
    Raises HpcMpError if a switch is above itself."""
    parent: dict[str, str] = {}
    for switch in switches:
        for child in switch.children:
            parent.setdefault(child, switch.name)
    above: dict[str, tuple[str, ...]] = {}
    for switch in sorted(switches, key=lambda switch: len(switch.children) > 0):
        chain = tuple(_ancestry(switch.name, parent))
        for host in switch.hosts:
            above.setdefault(host, chain)
    return SwitchTree(above)


def from_blocks(blocks: Sequence[Switch], sizes: Sequence[int]) -> SwitchTree:
    """Return the tree of blocks. If ``sizes`` (``BlockSizes``) has several entries, s[i] / s[0] neighbouring blocks are joined.
    Raises HpcMpError if a size is not a multiple of the first."""
    for size in sizes:
        if size < 1 or size % sizes[0]:
            raise HpcMpError(f"BlockSizes={','.join(map(str, sizes))}", f"{size} is not a multiple of {sizes[0]}",
                             "correct the topology")
    joined: dict[tuple[str, ...], Switch] = {}
    for size in sizes[1:]:
        number = size // sizes[0]
        for first in range(0, len(blocks), number):
            names = tuple(block.name for block in blocks[first : first + number])
            if len(names) > 1:  # Slurm joins leftover blocks too, but not a block with itself
                joined.setdefault(names, Switch(compress(names), children=names))
    return from_joined_blocks(blocks, tuple(joined.values()))


def from_joined_blocks(blocks: Sequence[Switch], joined: Sequence[Switch]) -> SwitchTree:
    """Return the tree of blocks and of the larger blocks that some of them form (their ``children``)."""
    larger = sorted(joined, key=lambda switch: len(switch.children))
    above: dict[str, tuple[str, ...]] = {}
    for block in blocks:
        chain = (block.name, *(switch.name for switch in larger if block.name in switch.children))
        for host in block.hosts:
            above.setdefault(host, chain)
    return SwitchTree(above)


def from_addresses(addresses: Iterable[tuple[str, str]]) -> SwitchTree:
    """Return the tree from ``SLURM_TOPOLOGY_ADDR`` and ``SLURM_TOPOLOGY_ADDR_PATTERN`` of every host.

    ``("spine.s1.n1", "switch.switch.node")``: n1 is below s1, s1 below spine. Raises HpcMpError if an address does not have the
    parts of its pattern, or the pattern does not end with ``node``.
    """
    above = {}
    for address, pattern in addresses:
        *kinds, last = pattern.split(".")
        *switches, host = address.split(".", len(kinds))  # further dots belong to the host's name
        if last != "node" or len(switches) != len(kinds) or not host:
            raise HpcMpError(f"SLURM_TOPOLOGY_ADDR={address}", f"does not match {pattern}",
                             "pass both variables as Slurm sets them")
        above[host] = tuple(reversed(switches))
    return SwitchTree(above)


def _ancestry(name: str, parent: Mapping[str, str]) -> Iterator[str]:
    visited: set[str] = set()
    while name not in visited:
        yield name
        visited.add(name)
        if name not in parent:
            return
        name = parent[name]
    raise HpcMpError(f"switch {name}", "is above itself", "correct the topology")


Kind = Literal["tree", "block", "ring", "flat"]


@dataclass(frozen=True, slots=True)
class Topology:
    """One topology; ``kind`` is its plugin."""

    name: str = "default"  # its name in topology.yaml
    kind: Kind = "flat"
    # switches of a tree; the blocks of topology/block and the rings of topology/ring, which have no children
    switches: tuple[Switch, ...] = ()
    sizes: tuple[int, ...] = ()  # ``BlockSizes``; empty for other kinds, and if blocks are known without it
    joined: tuple[Switch, ...] = ()  # larger blocks, if Slurm has named them; else ``sizes`` defines them
    default: bool = False  # True if it is the cluster's default (``cluster_default``)
    unread: str = ""  # the part that was skipped because it contains no switches; empty: nothing

    @property
    def tree(self) -> SwitchTree:
        """The switches above every host. Raises HpcMpError if a switch is above itself, or sizes are not multiples."""
        if self.kind == "block":
            return from_joined_blocks(self.switches, self.joined) if self.joined else from_blocks(self.switches, self.sizes)
        return from_switches(self.switches)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(host for switch in self.switches for host in switch.hosts))

    @property
    def tops(self) -> tuple[str, ...]:
        """Switches with nothing above them."""
        below = {child for switch in self.switches for child in switch.children}
        return tuple(switch.name for switch in self.switches if switch.name not in below)

    @property
    def apart(self) -> tuple[str, ...]:
        """Switches with nothing above them that separate the leaves: none of them is above everything that another is above."""
        children = {switch.name: switch.children for switch in self.switches}
        by_leaves: dict[frozenset[str], str] = {}
        for top in self.tops:
            below = {top}
            while grown := {child for name in below for child in children.get(name, ())} - below:
                below |= grown
            by_leaves.setdefault(frozenset(name for name in below if not children.get(name)), top)
        apart = tuple(top for leaves, top in by_leaves.items() if not any(leaves < others for others in by_leaves))
        return apart if len(apart) > 1 else ()


def chosen(topologies: Iterable[Topology]) -> Topology:
    """Return the cluster's default topology, else the first, else an empty one."""
    candidates = tuple(topologies)
    return next((topology for topology in candidates if topology.default), candidates[0] if candidates else Topology())


def only(topology: Topology, nodes: Collection[str]) -> Topology:
    """Return the topology without other hosts, and without switches that then have nothing below them. With several block
    sizes each block keeps its place, because joined blocks are determined by position."""
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


def unsound(sizes: Sequence[int]) -> int | None:
    """Return the first of BlockSizes with which Slurm does not start; None if it accepts all."""
    for size in sizes:
        times, rest = divmod(size, sizes[0]) if sizes[0] else (0, 1)
        if rest or times & (times - 1) or not times:
            return size
    return None


LONGEST = 64  # maximum characters of a switch's name (topology.conf(5))


@dataclass(frozen=True, slots=True)
class TopologyReading:
    """The topologies of a source."""

    topologies: tuple[Topology, ...]  # usually one; none if the source shows none
    origin: str  # their source, as a phrase: "ibnetdiscover (fabric.txt)"
    notes: tuple[str, ...] = ()  # gaps of the source, or warnings before the topology is used; sentences


def natural(name: str) -> tuple[tuple[int | str, ...], ...]:
    """Return a key that sorts n2 before n10, however long the numbers are."""
    parts = (part.lstrip("0") if part.isdecimal() else part for part in re.split(r"(\d+)", name) if part)
    return tuple((0, len(part), part) if part.isdecimal() or not part else (1, part) for part in parts)


def listed(hosts: Iterable[str]) -> str:
    """Return a short host list in natural order."""
    return compress(sorted(hosts, key=natural))


def legal(name: str, taken: Iterable[str] = ()) -> str:
    """Return a name like ``name`` that Slurm accepts for a switch or block and that is not in ``taken``. Blanks, commas, brackets
    and the like would end the name or be read as a host list."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")[:LONGEST] or "switch"
    if plain not in (used := set(taken)):
        return plain
    return next(other for number in range(2, len(used) + 3)
                if (other := f"{plain[: LONGEST - 1 - len(str(number))]}-{number}") not in used)


def group(name: str, hosts: Iterable[str]) -> Switch:
    """Return a leaf with its hosts in natural order, so that their list is short."""
    return Switch(name, tuple(sorted(dict.fromkeys(hosts), key=natural)))
