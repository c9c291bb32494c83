"""The ranks of a loop: how they find each other, whatever has started them.

==================================== ==========================================================================================
started by                           meet at
==================================== ==========================================================================================
a program that has made torch's      (they have met)
default process group
torchrun, ``hpc-mp run``             MASTER_ADDR and MASTER_PORT
srun                                 the first host of the step, at a port that follows from the job's number
mpirun                               an address that rank 0 tells the others through MPI
nothing                              (one rank)
==================================== ==========================================================================================
"""

import os
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.placement import Degrees, Placement, place
from hpc_mp.rundir.rank_env import RankEnv, identity, node_name
from hpc_mp.train.parallel.communicators import everyone
from hpc_mp.train.parallel.groups import Tree
from hpc_mp.train.rank import facts, mpi
from hpc_mp.train.rank.devices import Seat, agree_on_devices, device_choice, emulated, own_gpu, seat_of, taken
from hpc_mp.train.rank.rendezvous import START_TIMEOUT, Rendezvous, connect, meet, rendezvous

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # what torchrun and ``hpc-mp run`` set for every rank
STARTERS = "start ranks with hpc-mp run, torchrun, srun or mpirun, and leave this variable to them"
PORTS = range(20000, 30000)  # below those that Linux gives to outgoing connections


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a loop, as one of them sees them."""

    who: RankEnv
    host: Tree  # all ranks, over gloo
    device: torch.device
    backend: str  # of the messages of a step
    nodes: tuple[int, ...]  # the node of every rank, by number

    def placement(self, degrees: Degrees, order: str) -> Placement:
        """Return the place of every rank."""
        several = max(map(self.nodes.count, self.nodes))
        return place(degrees, "cluster" if order == "auto" else order, several, self.nodes)


def ranks() -> int:
    """Return the number of ranks, before they have met."""
    return dist.get_world_size() if dist.is_initialized() else _identity(os.environ).world


def join(device: str, environ: Mapping[str, str] = os.environ, timeout: timedelta = START_TIMEOUT) -> World:
    """Meet the other ranks. All ranks call this. ``device``: "auto", "cpu" or "cuda". Raises HpcMpError if the launcher says too
    little, or there is no GPU and ``device`` is "cuda"."""
    who = _identity(environ)
    if dist.is_initialized():
        who = replace(who, rank=dist.get_rank(), world=dist.get_world_size())
        host = everyone(timeout)
        gpu = own_gpu(device, who)
        seats = [Seat(*fact) for fact in facts.gather(astuple(seat_of(who, gpu)), host)]
        hosts = [seat.node for seat in seats]
        mine, backend = taken(gpu, device_choice(device, seats, emulated()))
    else:
        who, where = _meeting(who, environ)
        store, keys = meet(who, where, timeout)
        hosts = [keys.get(f"rank {rank}") for rank in range(who.world)]
        mine, backend = agree_on_devices(device, who, keys)
        host = connect(who, store, backend, backend)  # the user's own messages pass through the default group
    names = list(dict.fromkeys(hosts))
    return World(who, host, mine, backend, tuple(map(names.index, hosts)))


def _identity(environ: Mapping[str, str]) -> RankEnv:
    if all(name in environ for name in LAUNCHED):
        for name in (*LAUNCHED, *({"MASTER_PORT"} & environ.keys())):
            if not environ[name].isdecimal():
                raise HpcMpError(f"{name} = {environ[name]}", "is no whole number", STARTERS)
        rank, world, local_rank = (int(environ[name]) for name in LAUNCHED)
        if not rank < world:
            raise HpcMpError(f"RANK = {rank}", f"is no rank of WORLD_SIZE = {world}: ranks count from 0", STARTERS)
        return RankEnv(rank, world, local_rank, node_name(environ), "environment")
    return identity(environ)


def _meeting(who: RankEnv, environ: Mapping[str, str]) -> tuple[RankEnv, Rendezvous]:
    """Return this rank's identity and the place where ranks meet."""
    where = rendezvous(None, environ)
    if who.world == 1 or "MASTER_ADDR" in environ:
        return who, where
    if who.source == "Slurm":
        job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
        return who, replace(where, address=_first_host(environ), port=PORTS[(job * 16 + step) % len(PORTS)])
    if who.source in ("Open MPI", "PMI"):
        with mpi.world() as comm:
            return mpi.come_up(comm, place(Degrees(data=who.world), "cluster", who.world), None, who.node, where.secret)
    raise HpcMpError(f"RANK = {environ.get('RANK')}, WORLD_SIZE = {who.world}", "is set, but MASTER_ADDR and MASTER_PORT are not",
                     STARTERS)


def _first_host(environ: Mapping[str, str]) -> str:
    """Return the host of the step's first task."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes)  # up to a comma outside of brackets
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first is not None else nodes
