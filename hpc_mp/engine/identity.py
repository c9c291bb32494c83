"""Which rank am I? From Slurm's variables, else MPI's, else torchrun's."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.errors import HpcMpError


@dataclass(frozen=True, slots=True)
class Identity:
    """A rank before it has met the others. ``node`` is the scheduler's name of its node."""

    rank: int
    world: int
    local_rank: int
    node: str
    source: str


# source: (rank, world, local rank) variables, in the order they are looked up. A batch shell has SLURM_PROCID too but no
# step, so a step is asked for; torchrun inside a Slurm job says so with TORCHELASTIC_RUN_ID and wins.
SOURCES: tuple[tuple[str, str, tuple[str, str, str]], ...] = (
    ("torchrun", "TORCHELASTIC_RUN_ID", ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
    ("Slurm", "SLURM_STEP_ID", ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")),
    ("PMI", "PMI_RANK", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")),
    ("environment", "RANK", ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
)


def identity(environ: Mapping[str, str] = os.environ) -> Identity:
    """Raises HpcMpError when variables are half there; without any, this is the only rank."""
    for source, marker, names in SOURCES:
        if marker not in environ:
            continue
        missing = [name for name in names if name not in environ]
        if missing:
            raise HpcMpError(f"{marker} = {environ[marker]}", f"is set by {source} but {', '.join(missing)} is not",
                             "start ranks with srun, mpirun, torchrun or hpc-mp launch")
        rank, world, local_rank = (int(environ[name]) for name in names)
        return Identity(rank, world, local_rank, environ.get("SLURMD_NODENAME", socket.gethostname()), source)
    return Identity(0, 1, 0, environ.get("SLURMD_NODENAME", socket.gethostname()), "no launcher")
