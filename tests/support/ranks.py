"""Functions run on N forked ranks. The imports of a rank happen only once, so that 8 ranks take seconds."""

import ctypes
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
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

Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments
TIMEOUT = 120.0


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Call ``function(*args)`` on every rank of a new crew, and return the results by rank. Raises as ``Crew.call``."""
    crew = Crew(world, (function, args))
    try:
        return crew.answers(timeout)
    finally:
        crew.end()


class Crew:
    """Forked ranks with Slurm's variables set.

    Args:
        only: the one call that they answer, which need not be pickled. Without it they answer the calls of ``call``.
    """

    def __init__(self, world: int, only: Call | None = None) -> None:
        self._ranks: dict[Connection, tuple[int, int]] = {}  # to the process and the number of a rank
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.set_inheritable(True)
            for rank in range(world):
                here, there = Pipe()
                pid = os.fork()
                if pid == 0:
                    here.close()
                    _child(rank, world, listener, there, only)
                there.close()
                self._ranks[here] = pid, rank

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Call a function on every rank, and return the results by rank.

        Raises:
            RuntimeError: a rank failed (with the traceback of the first), or the timeout expired. No rank is left running.
        """
        call = pickle.dumps((function, args))
        for pipe in self._ranks:
            with suppress(BrokenPipeError):  # the answer of a rank that has died says so
                pipe.send_bytes(call)
        return self.answers(timeout)

    def answers(self, timeout: float) -> list[Any]:
        deadline, waiting = time.monotonic() + timeout, dict(self._ranks)
        results: list[Any] = [None] * len(waiting)
        failures: list[str] = []
        try:
            while waiting and not failures:
                ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:
                    failures.append(f"time is up; still running: ranks {[rank for _, rank in waiting.values()]}")
                for pipe in ready:
                    _, rank = waiting.pop(pipe)  # type: ignore[arg-type]
                    succeeded, results[rank] = _answer(pipe, rank)  # type: ignore[arg-type]
                    if not succeeded:
                        failures.append(f"rank {rank}:\n{results[rank]}")
        finally:
            if waiting or failures:
                self.end()
        if failures:
            raise RuntimeError("\n".join(failures))
        return results

    def end(self) -> None:
        for pid, _ in self._ranks.values():
            os.kill(pid, signal.SIGKILL)
        for pipe, (pid, _) in self._ranks.items():
            os.waitpid(pid, 0)
            pipe.close()
        self._ranks = {}


def _answer(pipe: Connection, rank: int) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())  # not ``recv``, in which torch would share tensors' memory
        return answer
    except (EOFError, OSError):
        return False, f"rank {rank} died"


def _child(rank: int, world: int, listener: socket.socket, parent: Connection, only: Call | None) -> None:
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the test process
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ.update({
            "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(world), "SLURM_LOCALID": str(rank), "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": "1", "SLURMD_NODENAME": "node0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
        if rank == 0:
            os.environ["HPC_MP_LISTEN_FD"] = str(listener.fileno())
        else:
            listener.close()
        while True:
            answer = _answered(only or pickle.loads(parent.recv_bytes()))
            sys.stdout.flush()
            parent.send_bytes(answer)
            if only is not None:
                break
    finally:
        os._exit(1)


def _answered(call: Call) -> bytes:
    """Return True and the result, or False and a traceback, pickled."""
    function, args = call
    try:
        return pickle.dumps((True, function(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def exit_codes(world: int, job_file: Path, before: Callable[[], None] = lambda: None, timeout: float = TIMEOUT) -> list[int]:
    """Return the exit codes of all ranks of a launched run. ``before``: called in each of them first."""

    def rank() -> int:
        before()
        return train(job_file)

    return run_ranks(world, rank, timeout=timeout)


def train(job_file: Path) -> int:
    """Run a rank of a launched run, without the interpreter's normal exit."""
    # the fork shares pytest's captured streams: the engine replaces them, and the child never returns to pytest
    return main(job_file)
