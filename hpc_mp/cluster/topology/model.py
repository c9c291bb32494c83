"""A topology as Slurm's files have it: the switches of a tree, or blocks and the sizes in which they are joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpc_mp.cluster.topology.tree import Switch, SwitchTree, from_blocks, from_joined_blocks, from_switches

Kind = Literal["tree", "block", "ring", "flat"]


@dataclass(frozen=True, slots=True)
class Topology:
    """One topology; ``kind`` is the plugin that it is for.

    Attributes:
        name: what topology.yaml calls it.
        switches: of a tree; the blocks of topology/block and the rings of topology/ring, which have no children.
        sizes: ``BlockSizes``; empty for other kinds, and where blocks are known without it.
        joined: larger blocks, where Slurm has named them; else ``sizes`` tells.
        default: the cluster's default (``cluster_default``).
        unread: what of it was read over, for it tells no switches; empty: nothing.
    """

    name: str = "default"
    kind: Kind = "flat"
    switches: tuple[Switch, ...] = ()
    sizes: tuple[int, ...] = ()
    joined: tuple[Switch, ...] = ()
    default: bool = False
    unread: str = ""

    @property
    def tree(self) -> SwitchTree:
        """What stands above every host. Raises HpcMpError: a switch is above itself, sizes are no multiples."""
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


def chosen(topologies: Iterable[Topology]) -> Topology:
    """The cluster's default topology, else the first, else one that knows nothing."""
    found = tuple(topologies)
    return next((topology for topology in found if topology.default), found[0] if found else Topology())
