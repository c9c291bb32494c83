"""Collectives by messages between pairs of ranks over gloo; and gradients of a step that overwrite those of the last one."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planting import planted
from ranks import run_ranks
from torch import Tensor

from hpc_mp.layout.flat import FlatLayout, ParameterSlot
from hpc_mp.layout.models import Weight
from hpc_mp.rundir.rank_env import identity
from hpc_mp.train.parallel import collectives
from hpc_mp.train.parallel.collectives import all_gather, all_reduce, reduce_scatter
from hpc_mp.train.parallel.communicators import axis_of
from hpc_mp.train.parallel.gradients import Sink, Slabs, UnitGradient
from hpc_mp.train.parallel.groups import Axis, StateAxes
from hpc_mp.train.rank.rendezvous import connect, meet, rendezvous

LENGTHS = 1, 7, 1 + collectives.LARGE // 8  # of a piece; the sum of the last one goes in two phases
LATE = 3  # in flight at once


@planted(collectives, "_swap")
def pieces_of_the_next_rank(swap: Callable[..., object], name: str, sent: list[Tensor], received: list[Tensor],
                            axis: Axis) -> object:
    """The negative control: every rank sends what is for the rank behind the receiver."""
    return swap(name, [sent[(rank + 1) % axis.size] for rank in range(axis.size)], received, axis)


def differences(before: Callable[[], object]) -> dict[str, float]:
    """Return the largest difference of each collective from the sum, or the row, that it should give."""
    before()
    who = identity(os.environ)
    connect(who, meet(who, rendezvous(None))[0], "gloo")
    axis = axis_of([range(who.world)], "gloo")
    away: dict[str, float] = {}

    def compare(name: str, result: Tensor, expected: Tensor) -> None:
        away[name] = max(away.get(name, 0.0), float((result - expected).abs().max()))

    for length in LENGTHS:
        numbers = torch.arange(who.world * length, dtype=torch.float64)
        of = [numbers.roll(rank) * (rank + 1) for rank in range(who.world)]  # integers: every order has the same sum
        total, mine = torch.stack(of).sum(0), slice(axis.rank * length, (axis.rank + 1) * length)
        summed = [of[axis.rank].clone() for _ in range(LATE)]
        for running in [all_reduce(values, axis) for values in summed]:
            running.wait()
        for values in summed:
            compare("all-reduce", values, total)
        inside, apart, into = of[axis.rank].clone(), of[axis.rank].clone(), torch.full((length,), 5.0, dtype=torch.float64)
        for running in (reduce_scatter(inside[mine], inside, axis), reduce_scatter(into, apart, axis)):
            running.wait()
        compare("reduce-scatter inside", inside[mine], total[mine])
        compare("reduce-scatter, added", into, total[mine] + 5)
        rows = torch.stack([values[:length] for values in of]).flatten()
        inside, apart = torch.zeros_like(rows), torch.zeros_like(rows)
        inside[mine] = rows[mine]
        for running in (all_gather(inside, inside[mine], axis), all_gather(apart, rows[mine].clone(), axis)):
            running.wait()
        compare("all-gather inside", inside, rows)
        compare("all-gather", apart, rows)
    dist.barrier(axis.group)
    return away


@pytest.mark.parametrize("ranks", [2, 3])
def test_pairs_of_ranks_give_every_rank_its_sums(ranks: int) -> None:
    for away in run_ranks(ranks, differences, lambda: None):
        assert len(away) == 5 and set(away.values()) == {0.0}


def test_a_piece_of_another_rank_is_seen() -> None:
    for away in run_ranks(3, differences, pieces_of_the_next_rank):
        assert min(away["all-reduce"], away["reduce-scatter inside"], away["reduce-scatter, added"]) > 0


def second_step(complete: bool) -> list[float]:
    """Return a unit's gradient after a step in which only one of its two weights has one, (9,); in the step before both had."""
    weights = Weight("used", (2, 3)), Weight("unused", (3,))
    slots = (ParameterSlot(weights[0], (slice(0, 2), slice(0, 3)), 0), ParameterSlot(weights[1], (slice(0, 3),), 6))
    groups: Any = SimpleNamespace(holders=lambda _: StateAxes(Axis(), Axis()), sharing=lambda _: Axis())
    slabs = Slabs(torch.float64, torch.device("cpu"))
    gradient = UnitGradient(FlatLayout("unit", slots, 1), groups, complete, 1, slabs)
    gradient.held.fill_(float("nan"))  # it has no meaning before the first step
    used, unused = (Sink(gradient, slot) for slot in slots)
    row, column = torch.ones(1, 3, dtype=torch.float64), torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    for factor in (1, 10):
        gradient.begin()
        gradient.announce()
        used.add_product(factor * column, row, more=True)
        used.add_product(factor * column, row)
        if factor == 1:
            unused.add(torch.full((3,), 4.0, dtype=torch.float64))
        gradient.reduce()
        slabs.settle()
        gradient.settle()
    return gradient.part[:9].tolist()


@pytest.mark.parametrize("complete", [True, False], ids=["whole gradients", "buckets"])
def test_a_weight_without_a_gradient_in_a_step_has_zeros(complete: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert second_step(complete) == [20, 20, 20, 40, 40, 40, 0, 0, 0]
    forget = UnitGradient._forget  # the negative control: nothing is overwritten in the second step
    monkeypatch.setattr(UnitGradient, "_forget", lambda gradient: gradient._views or forget(gradient))
    assert second_step(True) == [22, 22, 22, 44, 44, 44, 4, 4, 4]
