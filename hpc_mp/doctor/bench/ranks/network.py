"""What a backend offers to a measurement; ``torch_network`` and ``mpi_network`` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpc_mp.planner.collectives import Collective


class Network(Protocol):
    """All ranks, and the group of this one.

    Attributes:
        rank, world: among all ranks.
        member, members: among those of its group.
        device: the name of what holds the buffers.
        versions: of the libraries, for the record.
    """

    rank: int
    world: int
    member: int
    members: int
    device: str
    versions: dict[str, str]

    def buffer(self, elements: int) -> Any:
        """A one-dimensional array or tensor, on the device."""

    def table(self, values: Any) -> Any:
        """An array of float64 as what can be compared with a buffer."""

    def operation(self, this: Collective, send: Any, receive: Any) -> Callable[[], object]:
        """Starts the operation between the group's ranks when it is called. In place the two overlap as nccl-tests has it."""

    def finish(self) -> None:
        """Wait for what was started."""

    def stamp(self) -> Any:
        """A moment on the device's clock."""

    def between(self, stamps: Sequence[Any]) -> list[float]:
        """Seconds from each moment to the next; after ``finish``."""

    def barrier(self) -> None:
        """Wait for all ranks of all groups."""

    def gather(self, value: Any) -> list[Any] | None:
        """The value of every rank, on rank 0; None elsewhere."""

    def close(self) -> None:
        """Leave, once all have done their work."""
