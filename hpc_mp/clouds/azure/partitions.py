"""The node arrays of a cluster as cyclecloud-slurm sees them: one partition each."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.offer import Offer
from hpc_mp.clouds.azure.resolve import ResolvedCluster, ResolvedNode, ResolvedSetting

SCALE_SET_DEFAULT = 40  # Azure.MaxScalesetSize where it is left out


@dataclass(frozen=True, slots=True)
class Partition:
    """A node array that Slurm starts and stops.

    Attributes:
        name: ``slurm.partition``, else the array's.
        line: where the name stands.
        sizes: those of its MachineType that the catalogue knows.
        machine: its MachineType.
    """

    node: ResolvedNode
    name: str
    line: int
    machine: ResolvedSetting | None
    sizes: tuple[MachineType, ...]

    @property
    def hpc(self) -> ResolvedSetting | None:
        return self.node.configured("slurm.hpc")

    @property
    def is_hpc(self) -> bool:
        """Whether its nodes are put into one placement group: slurm.hpc is true unless it says otherwise."""
        return self.hpc is None or self.hpc.is_true

    @property
    def is_dynamic(self) -> bool:
        return any(self.node.configured(name) for name in ("slurm.dynamic_feature", "slurm.dynamic_config"))

    @property
    def size_line(self) -> int:
        return self.machine.line if self.machine else self.node.line

    @property
    def has_rdma(self) -> bool:
        return any(size.rdma for size in self.sizes)

    @property
    def scale_set(self) -> int | None:
        """How many machines one placement group of it holds; None where that is not known."""
        found = self.node.get("Azure.MaxScalesetSize")
        return SCALE_SET_DEFAULT if found is None else found.number


def sizes_of(node: ResolvedNode, offer: Offer) -> tuple[MachineType, ...]:
    """The sizes of a node that are in the catalogue."""
    machine = node.get("MachineType")
    found = (offer.size(word) for word in (machine.words if machine else ()))
    return tuple(size for size in found if size)


def partitions(cluster: ResolvedCluster, offer: Offer) -> tuple[Partition, ...]:
    """Node arrays with settings of Slurm for a partition, unless slurm.autoscale is false."""
    return tuple(_partition(node, offer) for node in cluster.real if _is_partition(node))


def _is_partition(node: ResolvedNode) -> bool:
    role = node.configured("slurm.role")
    of_slurm = any(node.configured(f"slurm.{key}") for key in ("partition", "hpc", "autoscale", "default_partition"))
    works = of_slurm and (role is None or role.text.casefold() == "execute")
    return node.is_array and not node.is_false("slurm.autoscale") and works


def _partition(node: ResolvedNode, offer: Offer) -> Partition:
    named = node.configured("slurm.partition")
    name, line = (named.written, named.line) if named and named.written else (node.name, node.line)
    return Partition(node, name, line, node.get("MachineType"), sizes_of(node, offer))
