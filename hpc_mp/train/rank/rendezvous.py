"""Rendezvous: where ranks meet, and the default process group that comes of it."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from hpc_mp.rundir import SECRET, AttemptRecord
from hpc_mp.rundir.rank_env import RankEnv, check_open_files
from hpc_mp.train.engine import gloo
from hpc_mp.train.engine.groups import Tree, everyone
from hpc_mp.train.rank.proof import SignedKeys, digest

START_TIMEOUT = timedelta(minutes=10)  # for all ranks to meet, where no job says how long it may take
LATER = timedelta(seconds=10)  # rank 0, which knows who is missing, shall speak first
DEFAULT = {"gloo": gloo.SILENT, "cpu:gloo,cuda:nccl": "cuda:nccl"}  # back end of the ranks' messages -> of the default group
NAMED = 8  # missing ranks, in words
FILES_TIMEOUT = timedelta(hours=24)  # rank 0 may have terabytes to tokenize, or a checkpoint of terabytes to verify


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a store waits for all ranks.

    Attributes:
        address, port: of the store, in rank 0's process.
        secret: of this start; ranks of another one that come here by mistake, and strangers, find nothing.
        listener: in rank 0, a socket that already listens there, so that nobody could take the port; None: the store
            binds it.
        hosted: whether rank 0 holds the store; torchrun brings its own.
    """

    address: str
    port: int
    secret: str = field(repr=False)
    listener: int | None = None
    hosted: bool = True


def rendezvous(record: AttemptRecord | None, environ: Mapping[str, str] = os.environ) -> Rendezvous:
    """As the launcher wrote it down, if it knew the hosts; else as MASTER_ADDR, MASTER_PORT and HPC_MP_LISTEN_FD say.

    Ranks that are started by hand, on several nodes, have a secret if HPC_MP_SECRET gives them one, the same for all; else
    they share what their scheduler says of the start, which others may guess.
    """
    if record is not None and record.address:
        return Rendezvous(record.address, record.port, record.secret)
    starts = (environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    secret = record.secret if record is not None else environ.get(SECRET, ".".join(starts))
    listening = environ.get("HPC_MP_LISTEN_FD")
    return Rendezvous(environ.get("MASTER_ADDR", "127.0.0.1"), int(environ.get("MASTER_PORT", "0")), secret,
                      int(listening) if listening else None, environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")


def meet(who: RankEnv, where: Rendezvous, timeout: timedelta = START_TIMEOUT) -> tuple[dist.Store, SignedKeys]:
    """Wait for all ranks; returns the store and this start's own keys of it.

    torch's store counts whoever connects as one of the ranks; so nobody waits for its count, and each rank says itself that it is
    here, and on which node (``seat``).

    Raises:
        HpcMpError: rank 0 may not open enough files.
        dist.DistError: some did not come in time.
        Intrusion: somebody else answers there.
    """
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


def connect(who: RankEnv, store: dist.Store, backend: str) -> Tree:
    """Make the default process group of ranks that have met; returns all ranks.

    In it ranks wait for each other's files too (``FILES_TIMEOUT``); a rank that hangs while it computes is noticed by its own
    watchdog, and by its neighbours in the groups of the mesh.
    """
    gloo.register()
    dist.init_process_group(DEFAULT[backend], store=store, rank=who.rank, world_size=who.world, timeout=FILES_TIMEOUT)
    return everyone(FILES_TIMEOUT)


def seat(rank: int) -> str:
    """The key under which a rank names its node."""
    return f"rank {rank}"


def _gather(who: RankEnv, keys: SignedKeys, timeout: timedelta) -> None:
    """Every rank says that it is here; rank 0 hears all of them, and says so."""
    everybody = [seat(rank) for rank in range(who.world)]
    keys.set(seat(who.rank), who.node)
    if who.rank == 0:
        try:
            keys.wait(everybody, timeout)
        except dist.DistError:
            absent = keys.absent(everybody)
            some = ", ".join(absent[:NAMED]) + (f" and {len(absent) - NAMED} more" if len(absent) > NAMED else "")
            came = f"{who.world - len(absent)} of {who.world} ranks came"
            raise dist.DistStoreError(f"{came}, {some} did not in {timeout.total_seconds():g} s") from None
        for key in everybody:
            keys.get(key)
        keys.set("all", "are here")
    keys.wait(["all"], timeout + LATER)
    keys.get("all")
