"""Simulation: the earliest times of a schedule's computations."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpc_mp.layout.schedule.actions import PRECEDING, Action, Kind, Message, Schedule, compute, consumed, produced

Times = Mapping[Kind, float | Mapping[int, float]]
"""The duration of each kind of computation: one for every stage, or global stage → duration."""

TIMES: Times = {"F": 1, "B": 2, "I": 1, "W": 1}
SLOTS: Times = {"F": 1, "B": 1, "I": 1, "W": 1}
"""Every computation takes one slot of a table."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One computation and its time, in the unit of the durations given."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The computations of every rank in order of time."""

    ranks: tuple[tuple[Slot, ...], ...]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(slots[-1].end for slots in self.ranks)

    @property
    def bubble(self) -> float:
        """Idle share of all rank time, 0 … 1. (P − 1) / (M + P − 1) for GPipe and 1F1B over equal stages."""
        busy = sum(slot.end - slot.start for slots in self.ranks for slot in slots)
        return 1 - busy / (len(self.ranks) * self.makespan)


def simulate(schedule: Schedule, times: Times = TIMES, latency: float = 0) -> Timeline:
    """Start every computation as soon as its rank is free and its inputs have arrived. Raises ValueError if the schedule
    deadlocks, naming the first action that can never start.

    Args:
        schedule: complete, or only computations; only the order of computations counts.
        times: durations of all kinds that occur; by default a backward takes two forwards, its parts one each.
        latency: time from the end of a computation to the arrival of its output on another rank.
    """
    placement, stages = schedule.placement, schedule.stages
    todo = [list(reversed(actions)) for actions in compute(schedule)]
    done: dict[Action, float] = {}  # an F or I → its end, for the B, I or W of that stage and microbatch
    arrivals: dict[Message, float] = {}  # a message for another stage, on another or the same rank → its arrival
    slots: list[list[Slot]] = [[] for _ in todo]

    def duration(action: Action) -> float:
        length = times[action.kind]
        return length[action.stage] if isinstance(length, Mapping) else length

    def start(action: Action) -> float | None:
        """Return the earliest start given the inputs; None if one has no end yet."""
        before, message = PRECEDING.get(action.kind), consumed(action, stages)
        inputs = [done.get(replace(action, kind=before))] if before else []
        inputs += [arrivals.get(message)] if message else []
        ends = [time for time in inputs if time is not None]
        return max(ends, default=0) if len(ends) == len(inputs) else None

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(todo):
            while actions and (ready := start(actions[-1])) is not None:
                action = actions.pop()
                begin = max(ready, slots[rank][-1].end if slots[rank] else 0)
                end = begin + duration(action)
                done[action] = end
                if message := produced(action, stages):
                    arrivals[message] = end + latency * message.travels(placement)
                slots[rank].append(Slot(action, begin, end))
                moved = True
    for actions in todo:
        if actions:
            raise ValueError(f"{actions[-1]} can never start")
    return Timeline(tuple(map(tuple, slots)))
