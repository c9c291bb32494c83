"""What a rank notes of its messages, whoever sends them, and what it writes down when it stands still."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import until
from ranks import run_ranks

from hpc_mp.diagnosis.waits import awaited
from hpc_mp.rundir import RunDirectory, create_run
from hpc_mp.rundir.standings import Wait, read_standings
from hpc_mp.train.rank.waits import COLLECTIVES, DIRECTED, Waits, noted


def joined() -> int:
    rank = int(os.environ["SLURM_PROCID"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0, master_listen_fd=int(
        os.environ["HPC_MP_LISTEN_FD"]) if rank == 0 else None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return rank


def test_every_message_of_torch_is_heard() -> None:
    """Whatever of a process group gives a ``Work`` is in one of the tables, but what only groups several messages."""
    sending = {name for name in dir(dist.ProcessGroup) if "Work" in (getattr(dist.ProcessGroup, name).__doc__ or "")}
    waits = Waits(0)
    with waits.listening():
        heard = {name for name in (*COLLECTIVES, *DIRECTED) if hasattr(getattr(dist.ProcessGroup, name, None), "__wrapped__")}
    assert not hasattr(dist.ProcessGroup.allreduce, "__wrapped__"), "and let go again"
    assert sending - heard == {"_end_coalescing", "_register_on_completion_hook", "recv_anysource"}


def test_messages_are_counted_alike_on_both_sides() -> None:
    def rank() -> tuple[dict[str, int], bool]:
        me, waits = joined(), Waits(int(os.environ["SLURM_PROCID"]))
        with waits.listening():
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(3), group=group)
            dist.all_gather_object([None, None], "object")
            for _ in range(2):
                (dist.send if me == 0 else dist.recv)(torch.ones(1), 1 - me, group=group)
            dist.all_reduce(torch.ones(3), async_op=True).wait()
            dist.barrier()
        quiet = waits.wait is None
        dist.barrier()
        return dict(waits.passed), quiet

    (first, quiet), (second, also) = run_ranks(2, rank)
    assert quiet and also
    assert {name: count for name, count in first.items() if "to" not in name} == {
        name: count for name, count in second.items() if "to" not in name}
    assert [count for name, count in first.items() if name.endswith("rank 0 to 1, sent")] == [2]
    assert [count for name, count in second.items() if name.endswith("rank 0 to 1, received")] == [2]


def test_who_stands_still_writes_and_takes_it_back(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1, which sleeps: both write, and rank 1 is the one; when they move on nothing is left."""
    run = create_run(tmp_path, "job")

    def rank() -> Any:
        me, waits = joined(), Waits(int(os.environ["SLURM_PROCID"]))
        with waits.listening(), noted(waits, run, 1, 0.0):
            dist.barrier()
            if me == 1:
                until(lambda: len(run.standing.found(1)) == 2)
                found = awaited(read_standings(run, 1), range(2))
            else:
                found = None
            dist.all_reduce(torch.ones(1))

            def taken_back() -> bool:
                waits.at(1)  # it moves again
                return not run.standing.found(1)

            until(taken_back)
        dist.barrier()
        return found and (found.rank, found.by)

    assert run_ranks(2, rank) == [None, (1, (0,))]


def waiting(path: Path, end: Connection) -> None:
    waits = Waits(0)
    waits.wait = Wait("all_reduce", (1,), "group 2", 22)
    with noted(waits, RunDirectory(path), 1, 0.0):
        end.recv()
    end.send(waits.since)


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_pause_is_no_wait(tmp_path: Path, paused: bool, fails: bool) -> None:
    """A rank stopped in the midst of a wait blamed its peer when it was woken, in its standing and in its last record."""
    run, (end, other) = create_run(tmp_path, "job"), multiprocessing.Pipe()
    rank = multiprocessing.get_context("fork").Process(target=waiting, args=(run.path, other))
    rank.start()
    until(lambda: bool(read_standings(run, 1)))
    woken = read_standings(run, 1)[0].time
    if paused:
        os.kill(rank.pid or 0, signal.SIGSTOP)
        time.sleep(1.5)  # longer than load explains
        woken = time.time()
        if fails:
            end.send("end")
        os.kill(rank.pid or 0, signal.SIGCONT)
    if not fails:
        until(lambda: any(standing.time > woken for standing in read_standings(run, 1)))
        assert (read_standings(run, 1)[0].since >= woken) is paused
    if not (paused and fails):
        end.send("end")
    assert (end.recv() >= woken) is paused
    rank.join()
