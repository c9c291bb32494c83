"""Groups over gloo: one thread for all of them, which hardly wakes where nothing comes, and names that all ranks agree on."""

from __future__ import annotations

import ctypes
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks

from hpc_mp.rundir.rank_env import identity
from hpc_mp.train.engine import gloo
from hpc_mp.train.engine.groups import new_group
from hpc_mp.train.rank.rendezvous import connect, meet, rendezvous

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
