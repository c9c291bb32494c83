"""What a schedule says to have arrived has arrived, at whatever speed its ranks compute; and a rank keeps few sent messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import Request, requests

from hpc_mp.layout.schedule import Action, Schedule, arrivals, build, peak_in_flight, simulate
from hpc_mp.layout.schedule.actions import consumed, produced
from hpc_mp.layout.schedule.simulate import Times


@st.composite
def speeds(draw: st.DrawFn) -> Times:
    """Every kind of computation on every stage takes a time of its own."""
    stages = range(24)
    return {kind: dict.fromkeys(stages, 1.0) | draw(st.dictionaries(st.sampled_from(stages), st.floats(0.01, 100), max_size=8))
            for kind in ("F", "B", "I", "W")}


def early(schedule: Schedule, times: Times, steps: int = 0) -> list[tuple[Action, Action]]:
    """(computation, send) of all proofs that do not hold at these speeds: what was sent is not yet being consumed when the
    computation begins, or the one that stands ``steps`` computations before it."""
    slots = simulate(schedule, times).ranks
    begins = {slot.action: slot.start for rank in slots for slot in rank}
    uses = {consumed(action, schedule.stages): begin for action, begin in begins.items()}
    found = []
    for rank, computations in enumerate(slots):
        order = [slot.action for slot in computations]
        for action, sends in arrivals(schedule, rank).items():
            moment = begins[order[max(0, order.index(action) - steps)]]
            found += [(action, send) for send in sends if uses[produced(send, schedule.stages)] > moment]
    return found


@given(requests(), speeds())
def test_what_is_said_to_have_arrived_has_arrived(request: Request, times: Times) -> None:
    assert early(build(*request), times) == []


def test_a_computation_sooner_it_may_not_have() -> None:
    """The negative control: the same proofs, given one computation too soon."""
    assert early(build("1f1b", 3, 6), {"F": {0: 1, 1: 50, 2: 1}, "B": 1}, steps=1)


@given(requests())
def test_each_message_is_proved_once_and_outputs_with_their_gradients(request: Request) -> None:
    schedule = build(*request)
    for rank, actions in enumerate(schedule.ranks):
        proved = arrivals(schedule, rank)
        sends = [send for computation in actions for send in proved.get(computation, ())]
        assert len(sends) == len(set(sends)) and set(sends) <= set(actions)
        assert {action for action in actions if action.kind == "SEND_F"} <= set(sends)
        for computation, known in proved.items():
            assert all(actions.index(send) < actions.index(computation) for send in known)


def most_kept(schedule: Schedule, rank: int) -> int:
    """The largest number of sent messages whose arrival nothing has proved yet."""
    proved, kept, most = arrivals(schedule, rank), 0, 0
    for action in schedule.ranks[rank]:
        kept += action.kind.startswith("SEND") - len(proved.get(action, ()))
        most = max(most, kept)
    return most


@pytest.mark.parametrize(("name", "virtual", "wanted"), [
    ("1f1b", 1, [4, 4, 3, 2]), ("zero_bubble", 1, [4, 4, 3, 2]), ("zero_bubble_v", 1, [7, 6, 6, 4]),
    ("interleaved_1f1b", 2, [11, 11, 9, 7])])
def test_what_is_kept_does_not_grow_with_the_microbatches(name: str, virtual: int, wanted: list[int]) -> None:
    for microbatches in (16, 64):
        schedule = build(name, 4, microbatches, virtual)
        assert [most_kept(schedule, rank) for rank in range(4)] == wanted
    assert all(kept <= peak_in_flight(actions) + 2 for kept, actions in zip(wanted, schedule.ranks, strict=True))


def test_under_gpipe_as_many_as_chunks() -> None:
    schedule = build("gpipe", 4, 16)
    assert [most_kept(schedule, rank) for rank in range(4)] == [peak_in_flight(actions) for actions in schedule.ranks]
