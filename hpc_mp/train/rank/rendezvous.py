"""Rendezvous: where ranks meet, and the default process group that comes of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from hpc_mp.rundir import AttemptRecord
from hpc_mp.train.rank.rank_env import RankEnv

START_TIMEOUT = timedelta(minutes=10)  # for all ranks to meet
FILES_TIMEOUT = timedelta(hours=24)  # rank 0 may have terabytes to tokenize, or a checkpoint of terabytes to verify


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a store waits for all ranks.

    Attributes:
        address, port: of the store, in rank 0's process.
        token: of this attempt; ranks of another one that come here by mistake find nothing.
        listener: in rank 0, a socket that already listens there, so that nobody could take the port; None: the store
            binds it.
        hosted: whether rank 0 holds the store; torchrun brings its own.
    """

    address: str
    port: int
    token: str
    listener: int | None = None
    hosted: bool = True


def rendezvous(record: AttemptRecord | None, environ: Mapping[str, str] = os.environ) -> Rendezvous:
    """As the launcher wrote it down, if it knew the hosts; else as MASTER_ADDR, MASTER_PORT and HPC_MP_LISTEN_FD say."""
    if record is not None and record.address:
        return Rendezvous(record.address, record.port, record.token)
    starts = (environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    token = record.token if record is not None else ".".join(starts)
    listening = environ.get("HPC_MP_LISTEN_FD")
    return Rendezvous(environ.get("MASTER_ADDR", "127.0.0.1"), int(environ.get("MASTER_PORT", "0")), token,
                      int(listening) if listening else None, environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")


def meet(who: RankEnv, where: Rendezvous, backend: str) -> dist.Store:
    """Wait for all ranks and make the default process group; returns this attempt's part of the store.

    In the default group ranks wait for each other's files too (``FILES_TIMEOUT``); a rank that hangs while it computes
    is noticed by its own watchdog, and by its neighbours in the groups of the mesh.
    """
    first = who.rank == 0
    store: dist.Store
    if who.world == 1:
        store = dist.HashStore()
    else:
        store = dist.TCPStore(where.address, where.port, who.world, is_master=first and where.hosted, timeout=START_TIMEOUT,
                              master_listen_fd=where.listener if first and where.hosted else None)
    store = dist.PrefixStore(f"hpc-mp/{where.token}", store)
    dist.init_process_group(backend, store=store, rank=who.rank, world_size=who.world, timeout=FILES_TIMEOUT)
    return store
