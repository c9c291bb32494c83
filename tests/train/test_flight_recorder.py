"""torch's flight recorder: a message that is under way names the ranks that have not come, by real groups and by NCCL's words."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from hpc_mp.rundir.rank_env import identity
from hpc_mp.rundir.standings import Wait
from hpc_mp.train.parallel import gloo
from hpc_mp.train.parallel.communicators import new_group
from hpc_mp.train.rank.flight_recorder import recorded, under_way
from hpc_mp.train.rank.rendezvous import connect, meet, rendezvous
from hpc_mp.train.rank.waits import Waits


def _standing(devices: bool) -> tuple[Wait | None, str]:
    """Rank 2 does not come to the second sum of a group; the others launch it and stand somewhere else."""
    who, waits = identity(os.environ), Waits(int(os.environ["SLURM_PROCID"]))
    waits.devices = devices
    with waits.listening():
        store, _ = meet(who, rendezvous(None))
        connect(who, store, "gloo")
        group = new_group([0, 2, 3], backend=gloo.GLOO, timeout=timedelta(seconds=90))
        late = None
        if group is not None:
            dist.all_reduce(torch.ones(2), group=group)
            late = None if who.rank == 2 else dist.all_reduce(torch.ones(2), group=group, async_op=True)
        store.set(f"launched {who.rank}", "")
        store.wait([f"launched {rank}" for rank in range(4)])
        standing = waits.standing()
        store.set(f"stood {who.rank}", "")
        store.wait([f"stood {rank}" for rank in range(4)])
        if who.rank == 2:
            dist.all_reduce(torch.ones(2), group=group)
        if late is not None:
            late.wait()
        store.set(f"done {who.rank}", "")
        if who.rank == 0:  # the store ends with it
            store.wait([f"done {rank}" for rank in range(4)])
    channel = "" if group is None else f"group {group.group_name}"
    return standing.wait, channel


def test_a_sum_that_a_device_has_not_finished_names_the_others() -> None:
    for rank, (wait, channel) in enumerate(run_ranks(4, _standing, True)):
        others = {0: (2, 3), 3: (0, 2)}.get(rank)
        assert wait == (None if others is None else Wait("all_reduce", others, channel, 2))


def test_where_hosts_wait_themselves_the_recorder_is_not_asked() -> None:
    assert [wait for wait, _ in run_ranks(4, _standing, False)] == [None] * 4


def entry(record: int, what: str, **named: Any) -> dict[str, Any]:
    directed = "->" in what or "<-" in what
    return {"record_id": record, "process_group": ["7", "undefined"], "profiling_name": what, "is_p2p": directed,
            "collective_seq_id": 5, "p2p_seq_id": 3, "state": "scheduled", "retired": False, **named}


GROUP = {"7": (4, 9)}


@pytest.mark.parametrize(("entries", "wait"), [
    ([entry(0, "nccl:all_reduce", state="completed"), entry(1, "nccl:_all_gather_base")],
     Wait("all_gather", (4,), "group 7", 5)),
    ([entry(1, "nccl:all_reduce"), entry(0, "nccl:reduce_scatter", state="started")], Wait("reduce_scatter", (4,), "group 7", 5)),
    ([entry(0, "nccl:recv 1<-0")], Wait("recv", (4,), "group 7, rank 4 to 9, sent", 3)),
    ([entry(0, "nccl:send 1->0")], Wait("send", (4,), "group 7, rank 9 to 4, received", 3)),
    ([entry(0, "nccl:all_reduce", retired=True)], None),
    ([entry(0, "nccl:all_reduce", process_group=["0", "default_pg"])], None), ([], None)])
def test_the_words_of_nccl(entries: list[dict[str, Any]], wait: Wait | None) -> None:
    assert under_way({"entries": entries}, GROUP, 9) == wait


def test_a_record_is_there_without_any_group() -> None:
    assert under_way(recorded(), {}, 0) is None
