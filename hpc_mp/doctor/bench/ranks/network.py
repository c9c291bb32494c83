"""The interface of a backend for a measurement; ``torch_network`` and ``mpi_network`` implement it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpc_mp.planner.collectives import Collective


class Network(Protocol):
    """The communicator of all ranks, and that of this rank's group.

    Attributes:
        rank, world: index and number of all ranks.
        member, members: index and number of the ranks of its group.
        device: name of the device with the buffers.
        versions: versions of the libraries, for the record.
    """

    rank: int
    world: int
    member: int
    members: int
    device: str
    versions: dict[str, str]

    def buffer(self, elements: int) -> Any:
        """Return a one-dimensional array or tensor on the device."""

    def table(self, values: Any) -> Any:
        """Convert an array of float64 for comparison with a buffer."""

    def operation(self, collective: Collective, send: Any, receive: Any) -> Callable[[], object]:
        """Return a function that starts the operation in the group. In place both buffers overlap as in nccl-tests."""

    def finish(self) -> None:
        """Wait for all started operations."""

    def stamp(self) -> Any:
        """Return a timestamp of the device's clock."""

    def between(self, stamps: Sequence[Any]) -> list[float]:
        """Return the seconds between consecutive timestamps; call it after ``finish``."""

    def barrier(self) -> None:
        """Wait for all ranks of all groups."""

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, None elsewhere."""

    def close(self) -> None:
        """Close the network after all ranks have finished."""
