"""Simulation: the earliest times of a schedule's computations."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.layout.schedule.actions import Action, Kind, Message, Schedule, compute, needs, produced, run

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
    deadlocks, naming the first action that can never start. ``schedule``: complete, or only computations; only the order of
    computations counts. ``times``: durations of all kinds that occur; by default a backward takes two forwards, its parts one
    each. ``latency``: time from the end of a computation to the arrival of its output on another rank."""
    placement, stages = schedule.placement, schedule.stages
    todo = [deque(actions) for actions in compute(schedule)]
    ends: dict[Action | Message, float] = {}  # of computations, and the arrivals of messages for other stages
    slots: list[list[Slot]] = [[] for _ in todo]

    def duration(action: Action) -> float:
        length = times[action.kind]
        return length[action.stage] if isinstance(length, Mapping) else length

    for rank, action in run(todo, lambda action: all(need in ends for need in needs(action, stages))):
        begin = max(*(ends[need] for need in needs(action, stages)), slots[rank][-1].end if slots[rank] else 0, 0)
        end = ends[action] = begin + duration(action)
        if message := produced(action, stages):
            ends[message] = end + latency * message.travels(placement)
        slots[rank].append(Slot(action, begin, end))
    for actions in filter(None, todo):
        raise ValueError(f"{actions[0]} can never start")
    return Timeline(tuple(map(tuple, slots)))
