"""Pipelines under NCCL's rule that two ranks wait for each other at their first message (no GPU is needed to show it). Groups
over gloo: one thread for all of them, which hardly wakes where nothing comes, and names that all ranks agree on."""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import run_engine
from exact import PLAIN, SEVERAL
from layouts import job, layout
from ranks import run_ranks

from hpc_mp.job import JobSpec
from hpc_mp.job.layout import layout_of, read_shape
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.rundir.rank_env import identity
from hpc_mp.train.dry_run.dry_run import stepped
from hpc_mp.train.parallel import communicators, gloo
from hpc_mp.train.parallel.communicators import new_group
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.bootstrap import lay_out
from hpc_mp.train.rank.rendezvous import connect, meet, rendezvous
from hpc_mp.train.rank.waits import Waits


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
    communicators.connect = lambda groups, device: None


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


EVERYTHING = [*SETTINGS, *layout(pipeline=2, tensor=2, context=2, data=2, zero=3, schedule="1f1b", microbatches=2),
              "parallel.shard_degree=2"]


def _first_messages(spec: JobSpec) -> tuple[list[str], set[str]]:
    """The groups of this rank in the order of their first messages, and those whose first message came in the first step."""
    who, waits = identity(os.environ), Waits(0)
    with waits.listening():
        host = connect(who, meet(who, rendezvous(None))[0], "gloo")
        shape = read_shape(spec)
        cut = layout_of(spec, shape)
        schedule = schedule_of(cut)
        made = communicators.build(lay_out(spec), cut.shard_degree, torch.device("cpu"), "gloo", schedule, None, host)
        all_of_them = {axis.group.group_name for axis in communicators.axes(made) if axis.group is not None}
        all_of_them |= {group.group_name for group in made.channels.groups.values() if group is not None}

        def spoken() -> list[str]:
            names = dict.fromkeys(channel.partition(",")[0].removeprefix("group ") for channel in waits.passed)
            return [name for name in names if name in all_of_them]

        connected = spoken()
        assert set(connected) == all_of_them
        stepped(spec, shape, cut, made, schedule)
        facts.barrier(host)  # the step's parameters may still be on their way
        return connected, {*spoken()} - {*connected}


@pytest.mark.parametrize(("model", "overrides"), [
    ("gpt2", EVERYTHING), ("mixtral", [*SETTINGS, *layout(data=4, expert=2, zero=2)])], ids=["all axes", "experts"])
def test_every_communicator_is_connected_before_the_first_step_in_one_order(place: Path, model: str,
                                                                            overrides: list[str]) -> None:
    spec = job(place, model, overrides)
    orders = run_ranks(spec.ranks, _first_messages, spec)
    assert all(not late and len(order) == len(set(order)) > 0 for order, late in orders)
    for one, _ in orders:
        for other, _ in orders:
            assert [name for name in one if name in other] == [name for name in other if name in one]


@dataclass
class NcclOptions:
    """What torch's class has where there is NCCL."""

    is_high_priority_stream: bool = False
    config: Any = field(default_factory=SimpleNamespace)


def test_options_arrive_where_there_is_nccl(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Messages between stages have few thread blocks, the tensor axis goes first, all others are as NCCL has them."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), raising=False)
    spec = job(place, "gpt2", EVERYTHING)
    options: list[tuple[list[int], Any]] = []

    def made(ranks: list[int], **named: Any) -> None:
        options.append((ranks, named["pg_options"]))

    maker = communicators._Maker("cpu:gloo,cuda:nccl", None, made)
    monkeypatch.setattr(dist, "get_rank", lambda *group: 0)
    cut = lay_out(spec)
    channels = maker.channels(cut.groups["pp"], schedule_of(layout_of(spec, read_shape(spec))))
    few = len(options)
    assert channels.groups and all(option.config.max_ctas == communicators.CHANNEL_CTAS for _, option in options)
    maker.axis(cut.groups["tp"], "tensor")
    urgent = len(options)
    maker.axis(cut.groups["dp"], "shard")
    assert [option.is_high_priority_stream for _, option in options] == [
        few <= number < urgent for number in range(len(options))]
    assert not any(vars(option.config) for _, option in options[few:])


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
