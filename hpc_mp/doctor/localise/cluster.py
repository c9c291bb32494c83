"""What is known of the cluster before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_mp.doctor.localise.record import Ints


@dataclass(frozen=True, slots=True)
class Cluster:
    """Attributes:
        names: of the nodes.
        leaf: index of each node's leaf, or None: not known.
        leaf_names: in the order of these indices.
        healthy: GB/s per rail that a healthy pair must reach, where that is known.
        taper: oversubscription of healthy uplinks, where that is known.
    """

    names: tuple[str, ...]
    leaf: Ints | None
    leaf_names: tuple[str, ...]
    rails: int
    healthy: float | None
    taper: float | None

    @property
    def size(self) -> int:
        return len(self.names)
