"""The identity of a rank: from its place, if a launcher states the host of each rank; else from its environment."""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.placement import Placement
from hpc_mp.rundir.layout import RunDirectory


@dataclass(frozen=True, slots=True)
class RankEnv:
    """A rank before it has met the others. ``node`` is the scheduler's name of its node."""

    rank: int
    world: int
    local_rank: int
    node: str
    source: str


SPARE_FILES = 64  # descriptors of a rank in addition to its connections: libraries, logs, data, devices


def check_open_files(connections: int, limit: int, where: str) -> None:
    """Check that rank 0 may open enough files. Raises HpcMpError. ``connections``: number of its connections, including one to
    every rank for the rendezvous. ``limit``: the hard limit of the process; negative if unlimited."""
    needed = connections + SPARE_FILES
    if 0 <= limit < needed:
        raise HpcMpError(f"the limit of open files {where} (ulimit -Hn = {limit})",
                         f"is too small: rank 0 has {connections} connections, and opens {SPARE_FILES} other files",
                         f"raise it to {needed} or more (limits.conf, LimitNOFILE of slurmd), or use fewer ranks")


# source: (rank, world, local rank) variables, in order of lookup. A batch shell has SLURM_PROCID too but no step, so a step is
# required. torchrun in a Slurm job is recognized by TORCHELASTIC_RUN_ID and takes precedence.
SOURCES: tuple[tuple[str, str, tuple[str, str, str]], ...] = (
    ("torchrun", "TORCHELASTIC_RUN_ID", ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
    ("Slurm", "SLURM_STEP_ID", ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")),
    ("PMI", "PMI_RANK", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")),
    ("environment", "RANK", ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
)


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def emulated_node(node: int) -> str:
    """Return the name of an emulated node."""
    return f"node{node}"


def identity(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """Return this process's identity; without variables it is the only rank. Raises HpcMpError for an incomplete set."""
    for source, marker, names in SOURCES:
        if marker not in environ:
            continue
        missing = [name for name in names if name not in environ]
        if missing:
            raise HpcMpError(f"{marker} = {environ[marker]}", f"is set by {source}, but {', '.join(missing)} is not",
                             "start ranks with srun, mpirun, torchrun or hpc-mp launch")
        rank, world, local_rank = (int(environ[name]) for name in names)
        return RankEnv(rank, world, local_rank, node_name(environ), source)
    return RankEnv(0, 1, 0, node_name(environ), "no launcher")


def say_host(run: RunDirectory, who: RankEnv) -> None:
    """Record the host of a started rank."""
    with suppress(OSError):  # a full disk must not stop a rank
        run.rank_host(who.rank).write_text(who.node, encoding="utf-8")


def at_place(placement: Placement, hosts: Sequence[str], host: str, local_rank: int, source: str) -> RankEnv:
    """Return the rank whose place is here, independent of the order in which the launcher started processes. ``hosts``: host of
    each node of the placement. Nodes of the same name are on one host, one after another. ``local_rank``: index of this process
    on the host, from 0. Raises HpcMpError if no rank belongs here."""
    places = sorted((place for place in placement.ranks if hosts[place.node] == host),
                  key=lambda place: (place.node, place.local_rank))
    if local_rank >= len(places):
        raise HpcMpError(f"host {host}, local rank {local_rank}",
                         f"is not the place of a rank: {len(places)} ranks run on {host}, the hosts are {', '.join(hosts)}",
                         "start ranks with the script that `hpc-mp launch` wrote, on the hosts that it chose")
    place = places[local_rank]
    return RankEnv(place.rank, len(placement.ranks), place.local_rank, host, source)


def check_place(placement: Placement, who: RankEnv, hosts: Sequence[str] | None) -> None:
    """Check that a rank runs at its place. ``hosts``: host of each node; None if no launcher has named them. Raises RuntimeError
    if the places differ; the message names both."""
    place = placement.ranks[who.rank]
    host = who.node if hosts is None else hosts[place.node]
    if (host, place.local_rank) != (who.node, who.local_rank):
        raise RuntimeError(f"rank {who.rank} is local rank {who.local_rank} on {who.node}, but placement.json has local rank "
                           f"{place.local_rank} on node {place.node}" + (f" ({host})" if hosts else ""))
