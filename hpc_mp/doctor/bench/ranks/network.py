"""The interface of a backend for a measurement; ``torch_network`` and ``mpi_network`` implement it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpc_mp.planner.collectives import Collective


class Network(Protocol):
    """The communicator of all ranks, and that of this rank's group."""

    rank: int
    world: int  # number of all ranks
    member: int  # index in its group
    members: int  # number of the ranks of its group
    device: str  # name of the one with the buffers
    versions: dict[str, str]  # of the libraries, for the record

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
