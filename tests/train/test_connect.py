"""Pipelines under NCCL's rule that two ranks wait for each other at their first message (no GPU is needed to show it). Groups
over gloo: one thread for all of them, which hardly wakes where nothing comes, and names that all ranks agree on."""

import ctypes
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import run_engine
from exact import PLAIN, SEVERAL
from layouts import job, layout
from ranks import run_ranks

from hpc_mp.rundir.rank_env import identity
from hpc_mp.train.parallel import gloo, groups
from hpc_mp.train.parallel.groups import new_group
from hpc_mp.train.rank.rendezvous import connect, meet, rendezvous


def connect_as_nccl(seconds: float = 90.0) -> None:
    """A rank's first message to or from another in a group blocks until the other's first message there, or for so long."""
    store_of = dist.distributed_c10d._get_default_store
    connected = set()

    def blocking(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: object, other: int, group: Any = None) -> Any:
            pair = f"{group.group_name} {min(other, dist.get_rank())} {max(other, dist.get_rank())}"
            if pair not in connected:
                connected.add(pair)
                store_of().set(f"{pair} {dist.get_rank()}", "")
                store_of().wait([f"{pair} {other}"], timedelta(seconds=seconds))
            return function(tensor, other, group=group)

        return call

    for name in ("send", "recv", "isend", "irecv"):
        setattr(dist, name, blocking(getattr(dist, name)))


def connect_in_the_first_step() -> None:
    connect_as_nccl(10.0)
    groups._say_hello = lambda channels, here, device: None


SETTINGS = ['train.precision="fp32"', "train.steps=1"]


@pytest.mark.parametrize(("pipeline", "schedule", "microbatches"), [
    *((4, name, 2) for name in PLAIN), *((2, name, 2) for name in SEVERAL),
    *(pytest.param(*case, marks=pytest.mark.prove) for case in ((3, "gpipe", 1), (2, "1f1b", 4)))])
def test_first_messages_never_wait_for_each_other(place: Path, pipeline: int, schedule: str, microbatches: int) -> None:
    stages = {"virtual_stages": 2} if schedule in SEVERAL else {}
    cut = layout(pipeline=pipeline, schedule=schedule, microbatches=microbatches, **stages)
    run_engine(job(place, "gpt2", [*SETTINGS, *cut]), before=connect_as_nccl)


def test_connecting_in_the_first_step_would_hang(place: Path) -> None:
    """Negative control: the last stage sends a gradient only after the forward before which it is awaited."""
    spec = job(place, "gpt2", [*SETTINGS, *layout(pipeline=2, schedule="gpipe", microbatches=2)])
    with pytest.raises(RuntimeError, match="rank"):
        run_engine(spec, before=connect_in_the_first_step)


TASKS = Path("/proc/self/task")
PAUSE_S = 1.0
MOST_PER_S = 90  # torch's own device wakes 100 times a second on a machine with time to spare


def _switches(thread: str) -> int:
    lines = (TASKS / thread / "status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def _threads_of_groups() -> tuple[list[float], int]:
    """How often each thread wakes per second that began with the device, and this thread's own slack in ns."""
    gloo.register()
    connect(identity(os.environ), meet(identity(os.environ), rendezvous(None))[0], "gloo")
    before = set(os.listdir(TASKS))
    gloo._device.cache_clear()
    device = gloo._device()  # it ends with the last reference to it
    new = sorted(set(os.listdir(TASKS)) - before)
    began, first = time.monotonic(), [_switches(thread) for thread in new]
    time.sleep(PAUSE_S)
    seconds = time.monotonic() - began
    rates = [(_switches(thread) - count) / seconds for thread, count in zip(new, first, strict=True)]
    del device
    return rates, ctypes.CDLL(None).prctl(gloo.PR_GET_TIMERSLACK)


def test_the_thread_of_all_groups_hardly_wakes_where_nothing_comes() -> None:
    own = ctypes.CDLL(None).prctl(gloo.PR_GET_TIMERSLACK)
    for rates, slack in run_ranks(2, _threads_of_groups):
        assert len(rates) == 1
        assert rates[0] < MOST_PER_S
        assert slack == own < gloo.SLACK_NS  # timers of the rank itself are as exact as ever


def _sums_of_uneven_groups() -> list[float]:
    """Five ranks make five groups, of which each is in two or three, and sum their numbers in these."""
    who = identity(os.environ)
    connect(who, meet(who, rendezvous(None))[0], "gloo")
    groups = [[0, 1], [2, 3], [1, 2, 4], [0, 1], [3, 4]]
    made = [new_group(ranks, backend=gloo.GLOO, timeout=timedelta(seconds=90)) for ranks in groups]
    sums = []
    for ranks, group in zip(groups, made, strict=True):
        assert (group is not None) == (who.rank in ranks)
        if group is not None:
            value = torch.full((1,), float(who.rank))
            dist.all_reduce(value, group=group)
            sums.append(value.item())
    return sums


def test_ranks_that_only_count_the_groups_of_others_name_their_own_alike() -> None:
    assert run_ranks(5, _sums_of_uneven_groups) == [[1.0, 1.0], [1.0, 7.0, 1.0], [5.0, 7.0], [5.0, 7.0], [7.0, 7.0]]
