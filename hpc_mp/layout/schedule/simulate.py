"""When does everything happen? The earliest times of a schedule's computations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.layout.schedule.actions import Action, Schedule, compute, source


@dataclass(frozen=True, slots=True)
class Slot:
    """One F or B and when it runs, in the unit of the durations given."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The computations of every rank in order of time."""

    ranks: tuple[tuple[Slot, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max(slots[-1].end for slots in self.ranks)

    @property
    def bubble(self) -> float:
        """Idle part of all rank time, 0 … 1. (P − 1) / (M + P − 1) for GPipe and 1F1B over equal stages."""
        busy = sum(slot.end - slot.start for slots in self.ranks for slot in slots)
        return 1 - busy / (len(self.ranks) * self.makespan)


def simulate(
    schedule: Schedule,
    forward: float | Mapping[int, float] = 1,
    backward: float | Mapping[int, float] = 2,
    latency: float = 0,
) -> Timeline:
    """Start every F and B as soon as its rank is free and its inputs are there.

    Args:
        schedule: complete, or computing alone; only the order of F and B counts.
        forward, backward: duration for every stage, or global stage → duration.
        latency: from the end of a computation to the arrival of its output on another rank.

    Raises:
        ValueError: the schedule deadlocks; the first action that can never start is named.
    """
    ranks = len(schedule)
    todo = [list(reversed(actions)) for actions in compute(schedule)]
    stages = 1 + max(action.stage for actions in todo for action in actions)
    ends: dict[Action, float] = {}
    slots: list[list[Slot]] = [[] for _ in schedule]

    def duration(action: Action) -> float:
        given = forward if action.kind == "F" else backward
        return given[action.stage] if isinstance(given, Mapping) else given

    def start(action: Action) -> float | None:
        """Earliest start given the inputs; None if one has no end yet."""
        inputs: list[tuple[Action, float]] = []
        if (before := source(action, stages)) is not None:
            inputs.append((before, 0 if before.stage % ranks == action.stage % ranks else latency))
        if action.kind == "B":
            inputs.append((Action("F", action.stage, action.microbatch), 0))
        if any(need not in ends for need, _ in inputs):
            return None
        return max((ends[need] + delay for need, delay in inputs), default=0)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(todo):
            while actions and (ready := start(actions[-1])) is not None:
                action = actions.pop()
                begin = max(ready, slots[rank][-1].end if slots[rank] else 0)
                ends[action] = begin + duration(action)
                slots[rank].append(Slot(action, begin, ends[action]))
                moved = True
    for actions in todo:
        if actions:
            raise ValueError(f"{actions[-1]} can never start")
    return Timeline(tuple(map(tuple, slots)))
