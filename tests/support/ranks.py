"""Functions run on N forked ranks. The imports of a rank happen only once, so that 8 ranks take seconds."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

import hpc_mp.train.rank.assemble  # noqa: F401
from hpc_mp.layout.models import FAMILIES
from hpc_mp.train.rank.main import main

for module in (module for family in FAMILIES.values() for module in family.modules):
    importlib.import_module(module)


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``function(*args)`` on every rank with Slurm's variables set, and return the results by rank.

    Raises:
        RuntimeError: a rank failed (with the traceback of the first), or the timeout expired. No rank is left running.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.set_inheritable(True)
    children: dict[int, tuple[int, int]] = {}
    for rank in range(world):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _child(rank, world, port, listener, write, function, args)
        os.close(write)
        children[read] = (pid, rank)
    listener.close()
    return _collect(children, world, time.monotonic() + timeout)


def _child(
    rank: int, world: int, port: int, listener: socket.socket, write: int, function: Callable[..., Any], args: Any,
) -> None:
    code = 1
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the test process
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ.update({
            "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(world), "SLURM_LOCALID": str(rank), "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": "1", "SLURMD_NODENAME": "node0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        })
        if rank == 0:
            os.environ["HPC_MP_LISTEN_FD"] = str(listener.fileno())
        else:
            listener.close()
        answer: tuple[bool, Any] = (True, function(*args))
        code = 0
    except BaseException:
        answer = (False, traceback.format_exc())
    with os.fdopen(write, "wb") as pipe:
        pickle.dump(answer, pipe)
    sys.stdout.flush()
    os._exit(code)


def _collect(children: dict[int, tuple[int, int]], world: int, deadline: float) -> list[Any]:
    results: list[Any] = [None] * world
    failures: list[str] = []
    waiting = dict(children)
    data: dict[int, bytes] = {fd: b"" for fd in children}
    try:
        while waiting and not failures:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.append(f"time is up; still running: ranks {[rank for _, rank in waiting.values()]}")
            for fd in ready:
                if chunk := os.read(fd, 1 << 20):
                    data[fd] += chunk
                    continue
                _, rank = waiting.pop(fd)
                succeeded, results[rank] = pickle.loads(data[fd]) if data[fd] else (False, f"rank {rank} died")
                if not succeeded:
                    failures.append(f"rank {rank}:\n{results[rank]}")
    finally:
        for pid, _ in children.values():
            if failures:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for fd in children:
            os.close(fd)
    if failures:
        raise RuntimeError("\n".join(failures))
    return results


def train(job_file: Path) -> int:
    """Run a rank of a launched run, without the interpreter's normal exit."""
    # the fork shares pytest's captured streams: the engine replaces them, and the child never returns to pytest
    return main(job_file)
