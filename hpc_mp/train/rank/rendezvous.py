"""Rendezvous: the place where ranks meet, and the default process group that results."""

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpc_mp.base.text import several
from hpc_mp.rundir import SECRET, AttemptRecord
from hpc_mp.rundir.rank_env import RankEnv, check_open_files
from hpc_mp.train.parallel import gloo
from hpc_mp.train.parallel.communicators import everyone
from hpc_mp.train.parallel.groups import Tree
from hpc_mp.train.rank.proof import SignedKeys, digest

START_TIMEOUT = timedelta(minutes=10)  # for all ranks to meet, if no job sets a limit
LATER = timedelta(seconds=10)  # rank 0, which knows the missing ranks, must report first
DEFAULT = {"gloo": gloo.SILENT, "cpu:gloo,cuda:nccl": "cuda:nccl"}  # back end of the ranks' messages -> of the default group
NAMED = 8  # missing ranks that a message names
FILES_TIMEOUT = timedelta(hours=24)  # rank 0 may have to tokenize terabytes, or to verify a checkpoint of terabytes


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address of the store that waits for all ranks.

    Attributes:
        address, port: of the store, in rank 0's process.
        secret: the secret of this start; ranks of another start that connect by mistake, and strangers, find nothing.
        listener: in rank 0, a socket that already listens there, so that nobody could take the port; None: the store binds it.
        hosted: True if rank 0 holds the store; torchrun brings its own.
    """

    address: str
    port: int
    secret: str = field(repr=False)
    listener: int | None = None
    hosted: bool = True


def rendezvous(record: AttemptRecord | None, environ: Mapping[str, str] = os.environ) -> Rendezvous:
    """Return the rendezvous of this start. It is in the launcher's record, if the launcher knew the hosts, else in MASTER_ADDR,
    MASTER_PORT and HPC_MP_LISTEN_FD. Ranks that are started by hand on several nodes have a secret if HPC_MP_SECRET gives all of
    them the same one. Otherwise they derive it from what their scheduler reports of the start, which others may guess."""
    if record is not None and record.address:
        return Rendezvous(record.address, record.port, record.secret)
    starts = (environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    secret = record.secret if record is not None else environ.get(SECRET, ".".join(starts))
    listening = environ.get("HPC_MP_LISTEN_FD")
    return Rendezvous(environ.get("MASTER_ADDR", "127.0.0.1"), int(environ.get("MASTER_PORT", "0")), secret,
                      int(listening) if listening else None, environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")


def meet(who: RankEnv, where: Rendezvous, timeout: timedelta = START_TIMEOUT) -> tuple[dist.Store, SignedKeys]:
    """Wait for all ranks. Return the store and this start's own keys in it. torch's store counts every client as one of the
    ranks. So its count is not used: each rank announces itself and its node (``seat``). Raises HpcMpError if rank 0's limit of
    open files is too small. Raises dist.DistError if some ranks did not come in time. Raises Intrusion if something else answers
    there."""
    first = who.rank == 0
    store: dist.Store
    if first:
        check_open_files(who.world, resource.getrlimit(resource.RLIMIT_NOFILE)[1], f"on {who.node}")
    if who.world == 1:
        store = dist.HashStore()
    else:
        store = dist.TCPStore(where.address, where.port, who.world, is_master=first and where.hosted, timeout=timeout,
                              wait_for_workers=False, master_listen_fd=where.listener if first and where.hosted else None)
    store = dist.PrefixStore(f"hpc-mp/{digest(where.secret, 'store')}", store)
    keys = SignedKeys(dist.PrefixStore("own", store), where.secret)
    _gather(who, keys, timeout)
    return store, keys


def connect(who: RankEnv, store: dist.Store, backend: str, default: str | None = None) -> Tree:
    """Make the default process group of ranks that have met, and return all ranks. ``backend``: of the ranks' messages.
    ``default``: of the default group; None: one that connects no ranks over gloo, see ``gloo``.

    In this group, ranks also wait for each other's files (``FILES_TIMEOUT``). A rank that hangs while it computes is noticed by
    its own watchdog, and by its neighbours in the groups of the mesh.
    """
    gloo.register()
    dist.init_process_group(default or DEFAULT[backend], store=store, rank=who.rank, world_size=who.world, timeout=FILES_TIMEOUT)
    return everyone(FILES_TIMEOUT)


@contextmanager
def process_group(backend: str, **options: Any) -> Iterator[None]:
    """Make the default process group of a process that is the only one. ``options``: those of torch."""
    dist.init_process_group(backend, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def seat(rank: int) -> str:
    """Return the key under which a rank names its node."""
    return f"rank {rank}"


def _gather(who: RankEnv, keys: SignedKeys, timeout: timedelta) -> None:
    """Announce this rank. Rank 0 waits for all ranks and then confirms it."""
    everybody = [seat(rank) for rank in range(who.world)]
    keys.set(seat(who.rank), who.node)
    if who.rank == 0:
        try:
            keys.wait(everybody, timeout)
        except dist.DistError:
            absent = keys.absent(everybody)
            came = f"{who.world - len(absent)} of {who.world} ranks came"
            raise dist.DistStoreError(f"{came}, {several(absent, NAMED)} did not in {timeout.total_seconds():g} s") from None
        for key in everybody:
            keys.get(key)
        keys.set("all", "are here")
    keys.wait(["all"], timeout + LATER)
    keys.get("all")
