"""Schedules as pure functions: first the order of computing, then communication, then reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import Literal

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.schedule.actions import Action, Kind, Schedule, receive, send

Reduce = Literal["last", "each"]


def gpipe(pipeline: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """All forwards, then all backwards, both in microbatch order (Huang et al. 2019). Computing only."""
    _one_stage_per_rank("gpipe", virtual_stages)
    forward_backward: tuple[Kind, Kind] = ("F", "B")

    def order(stage: int) -> tuple[Action, ...]:
        return tuple(Action(kind, stage, m) for kind in forward_backward for m in range(microbatches))

    return tuple(order(stage) for stage in range(pipeline))


def one_f_one_b(pipeline: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Megatron's 1F1B: on stage s min(M, P − s − 1) forwards, then forward and backward in turn. Computing only."""
    _one_stage_per_rank("1f1b", virtual_stages)

    def order(stage: int) -> tuple[Action, ...]:
        forwards = [Action("F", stage, m) for m in range(microbatches)]
        backwards = [Action("B", stage, m) for m in range(microbatches)]
        return _alternate(forwards, backwards, warmup=pipeline - stage - 1)

    return tuple(order(stage) for stage in range(pipeline))


def interleaved_1f1b(pipeline: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """1F1B with V stages per rank, microbatches in rounds of P (Narayanan et al. 2021). Computing only.

    Rank r holds the stages r, r + P, … and does 2 (P − r − 1) + (V − 1) P forwards first.

    Raises:
        HpcMpError: ``microbatches`` is no multiple of ``pipeline``.
    """
    if microbatches % pipeline:
        more = -(-microbatches // pipeline) * pipeline
        raise HpcMpError(f"microbatches = {microbatches}",
                         f"interleaved_1f1b needs a multiple of pipeline({pipeline}); {microbatches} % {pipeline} = "
                         f"{microbatches % pipeline}",
                         f"use {more} microbatches, or schedule 1f1b")
    rounds = range(0, microbatches, pipeline)

    def order(rank: int) -> tuple[Action, ...]:
        def actions(kind: Kind, chunks: range) -> list[Action]:
            return [Action(kind, rank + chunk * pipeline, microbatch)
                    for first in rounds for chunk in chunks for microbatch in range(first, first + pipeline)]

        chunks = range(virtual_stages)
        warmup = 2 * (pipeline - rank - 1) + (virtual_stages - 1) * pipeline
        return _alternate(actions("F", chunks), actions("B", chunks[::-1]), warmup)

    return tuple(order(rank) for rank in range(pipeline))


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
}
"""Name → the order of computing for (pipeline, microbatches, virtual_stages)."""


def build(name: str, pipeline: int, microbatches: int, virtual_stages: int = 1, reduce: Reduce = "last") -> Schedule:
    """A complete schedule: one list of actions for each of ``pipeline`` ranks.

    ``reduce`` says after which backwards a stage's gradients are synchronised: its ``last`` one (ZeRO-0/1), or ``each``
    (ZeRO-2/3).

    Raises:
        HpcMpError: an unknown name, a size below 1, or microbatches or virtual stages the schedule cannot take.
    """
    if name not in SCHEDULES:
        raise HpcMpError(f"schedule = {name!r}", "is not a schedule", f"use one of {', '.join(SCHEDULES)}")
    for key, value in (("pipeline", pipeline), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if value < 1:
            raise HpcMpError(f"{key} = {value}", "must be at least 1", f"set {key} to 1 or more")
    order = SCHEDULES[name](pipeline, microbatches, virtual_stages)
    return with_reductions(with_communication(order, pipeline * virtual_stages), reduce)


def with_communication(schedule: Schedule, stages: int) -> Schedule:
    """Put a SEND behind every F and B whose output another rank consumes, and post each RECV one computation early.

    A RECV stands before the F or B that precedes its consumer, so that it is under way while that one computes.
    Neighbouring stages on one rank need neither.
    """
    ranks = len(schedule)

    def rank(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        found = [receive(actions[0], stages, ranks)]
        for action, following in zip_longest(actions, actions[1:]):
            found += [following and receive(following, stages, ranks), action, send(action, stages, ranks)]
        return tuple(action for action in found if action is not None)

    return tuple(map(rank, schedule))


def with_reductions(schedule: Schedule, reduce: Reduce) -> Schedule:
    """Put a REDUCE after ``each`` B, or after the ``last`` B of every stage: behind its SEND_B, for which another rank waits."""

    def rank(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        backwards = [action for action in actions if action.kind == "B"]
        synchronising = set(backwards if reduce == "each" else {b.stage: b for b in backwards}.values())
        found: list[Action] = []
        for action, following in zip_longest(actions, actions[1:]):
            found.append(action)
            backward = replace(action, kind="B")
            if action.kind in ("B", "SEND_B") and backward in synchronising and following != replace(action, kind="SEND_B"):
                found.append(replace(action, kind="REDUCE"))
        return tuple(found)

    return tuple(map(rank, schedule))


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """``warmup`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return (*forwards[:warmup], *steady, *backwards[max(0, len(forwards) - warmup) :])


def _one_stage_per_rank(name: str, virtual_stages: int) -> None:
    if virtual_stages != 1:
        raise HpcMpError(f"virtual_stages = {virtual_stages}", f"{name} has one stage per rank",
                         "leave virtual_stages = 1, or use schedule interleaved_1f1b")
