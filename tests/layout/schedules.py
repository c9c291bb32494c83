"""Schedules for tests: sizes that each of them takes or refuses, and schedules spoilt by hand."""

from dataclasses import replace

from hypothesis import strategies as st

from hpc_mp.layout.schedule import Action, Schedule
from hpc_mp.layout.schedule.names import STAGES_PER_RANK

Request = tuple[str, int, int, int]  # name, pipeline ranks, microbatches, virtual stages

NAMES = sorted(STAGES_PER_RANK)
SMALL: list[Request] = [
    ("gpipe", 3, 4, 1), ("1f1b", 3, 4, 1), ("interleaved_1f1b", 2, 4, 2), ("breadth_first", 2, 3, 2), ("zero_bubble", 3, 4, 1),
    ("zero_bubble_v", 2, 4, 1)]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    name = draw(st.sampled_from(NAMES))
    pipeline = draw(st.integers(1, 8))
    microbatches = draw(st.integers(1, 16))
    if name == "interleaved_1f1b":
        microbatches = pipeline * draw(st.integers(1, 16 // pipeline))
    return name, pipeline, microbatches, draw(st.integers(1, 3)) if STAGES_PER_RANK[name] is None else 1


def with_rank(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> Schedule:
    return replace(schedule, ranks=(*schedule.ranks[:rank], actions, *schedule.ranks[rank + 1 :]))


def swapped(schedule: Schedule, rank: int, a: Action, b: Action) -> Schedule:
    other = {a: b, b: a}
    assert {a, b} <= set(schedule.ranks[rank])
    return with_rank(schedule, rank, tuple(other.get(action, action) for action in schedule.ranks[rank]))
