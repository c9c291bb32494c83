"""The validator: whatever is spoilt in a schedule is refused with the action named; what NCCL's rule lets through."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from schedules import SMALL, Request, requests, swapped, with_rank
from tables import table

from hpc_mp.layout.schedule import Action, Kind, Reduce, Schedule, build, simulate, validate
from hpc_mp.layout.schedule.validate import Channel, check_streams, own_stream

REDUCE: tuple[Reduce, ...] = ("last", "each")


def shared_stream(channel: Channel) -> None:
    """One communicator for all messages of a rank."""


@pytest.mark.parametrize("request_", SMALL)
@pytest.mark.parametrize("reduce", REDUCE)
def test_every_action_is_needed_once(request_: Request, reduce: Reduce) -> None:
    schedule = build(*request_, reduce)
    for rank, actions in enumerate(schedule.ranks):
        for i, action in enumerate(actions):
            twice = with_rank(schedule, rank, (*actions[:i], action, *actions[i:]))
            with pytest.raises(ValueError, match=re.escape(str(action))):
                validate(twice)
            without = with_rank(schedule, rank, actions[:i] + actions[i + 1 :])
            if action.kind == "REDUCE" and any(a.kind == "REDUCE" and a.stage == action.stage for a in actions[i + 1 :]):
                validate(without)  # the stage's gradients are synchronised later as well
            else:
                with pytest.raises(ValueError, match=re.escape(str(action))):
                    validate(without)


@pytest.mark.parametrize(("name", "rank", "a", "b", "message"), table(__file__, "schedule_validator.toml", "swaps"))
def test_swapped_actions_are_refused(name: str, rank: int, a: list[Any], b: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(swapped(build(name, 3, 4), rank, Action(*a), Action(*b)))


def patient(kinds: tuple[Kind, ...], stage: int) -> tuple[Action, ...]:
    return tuple(Action(kind, stage, m) for m in range(2) for kind in kinds)


def test_ranks_waiting_for_each_other_are_refused() -> None:
    """1F1B without its warm-up: stage 0 wants its backward before the second forward, GPipe's stage 1 after it."""
    schedule = with_rank(build("gpipe", 2, 2), 0, (*patient(("F", "SEND_F", "RECV_B", "B"), 0), Action("REDUCE", 0, 1)))
    both = r"deadlock: rank 0 at B\(stage 0, microbatch 0\), rank 1 at F\(stage 1, microbatch 1\); under way: rank 0 in RECV_B"
    with pytest.raises(ValueError, match=both):
        validate(schedule)
    with pytest.raises(ValueError, match=r"B\(stage 0, microbatch 0\) can never start"):
        simulate(schedule)


def test_wrong_ranks_stages_and_superfluous_actions_are_refused() -> None:
    schedule = build("1f1b", 2, 2)
    first, second = schedule.ranks
    for wrong, message in (
        (with_rank(schedule, 1, (*second, first[0])), r"F\(stage 0, microbatch 0\) is on rank 1, its stage on rank 0"),
        (with_rank(schedule, 1, (*second, Action("F", 7, 0))), r"F\(stage 7, microbatch 0\) is on a stage that does not exist"),
        (with_rank(schedule, 1, (*second, Action("SEND_F", 1, 0))), r"SEND_F\(stage 1, microbatch 0\) appears 1 times"),
        (replace(build("1f1b", 2, 3), microbatches=2), r"F\(stage 0, microbatch 2\) appears 1 times, expected 0"),
        (replace(schedule, microbatches=3), r"F\(stage 0, microbatch 2\) appears 0 times, expected once"),
        (replace(schedule, ranks=(*schedule.ranks, ())), "rank 2 holds no stage"),
    ):
        with pytest.raises(ValueError, match=message):
            validate(wrong)


def test_a_backward_is_whole_or_in_two_parts() -> None:
    """A B beside an I and a W; an I alone; and, which is right, some microbatches whole and some in parts."""
    schedule = build("zero_bubble", 1, 2)
    (actions,) = schedule.ranks
    with pytest.raises(ValueError, match=r"B\(stage 0, microbatch 0\) appears 1 times, expected 0"):
        validate(with_rank(schedule, 0, (*actions[:2], Action("B", 0, 0), *actions[2:])))
    with pytest.raises(ValueError, match=r"W\(stage 0, microbatch 0\) appears 0 times"):
        validate(with_rank(schedule, 0, tuple(action for action in actions if action != Action("W", 0, 0))))
    kinds: tuple[Kind, ...] = ("F", "I", "W", "REDUCE")
    validate(with_rank(schedule, 0, (Action("F", 0, 1), Action("B", 0, 1), *(Action(kind, 0, 0) for kind in kinds))))


@given(requests())
def test_a_communicator_for_each_direction_and_payload_blocks_nobody(request: Request) -> None:
    check_streams(build(*request), own_stream)


def test_one_stream_for_all_messages_of_a_rank_blocks() -> None:
    """1F1B on one communicator: rank 0 posts RECV_B ahead of its second SEND_F, rank 1 RECV_F ahead of its first SEND_B."""
    both = (r"deadlock: rank 0 at B\(stage 0, microbatch 0\), rank 1 at F\(stage 1, microbatch 1\); "
            r"under way: rank 0 in RECV_B\(stage 0, microbatch 0\), rank 1 in RECV_F\(stage 1, microbatch 1\)")
    with pytest.raises(ValueError, match=both):
        check_streams(build("1f1b", 2, 4), shared_stream)


def just_in_time(schedule: Schedule) -> Schedule:
    """Every receive directly before its consumer instead of one computation early."""
    def moved(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        found: list[Action] = []
        for action in actions:
            receive = Action(f"RECV_{'F' if action.kind == 'F' else 'B'}", action.stage, action.microbatch)  # type: ignore[arg-type]
            if action.kind in ("F", "B", "I") and receive in actions:
                found.append(receive)
            if not action.kind.startswith("RECV"):
                found.append(action)
        return tuple(found)

    return replace(schedule, ranks=tuple(map(moved, schedule.ranks)))


def test_one_stream_does_where_no_receive_stands_before_a_send() -> None:
    """The control: GPipe with receives just in time runs on one stream, so the rule does not refuse everything."""
    schedule = just_in_time(build("gpipe", 3, 4))
    validate(schedule)
    check_streams(schedule, shared_stream)


def test_a_circle_of_messages_on_one_communicator_is_refused() -> None:
    """Two stages per rank on two ranks: with one stream per pair of ranks, forwards of both ranks stand before each other's."""
    def one_stream_per_pair(channel: tuple[int, int, str]) -> frozenset[int]:
        return frozenset(channel[:2])

    schedule = build("interleaved_1f1b", 2, 4, 2)
    with pytest.raises(ValueError, match=r"under way: rank 0 in RECV_F\(stage 2"):
        check_streams(schedule, one_stream_per_pair)  # type: ignore[arg-type]
    check_streams(schedule, own_stream)


def test_messages_of_a_channel_are_in_one_order_on_both_sides() -> None:
    """Two stages that rank 0 sends to rank 1 are one channel: the rank that consumes them in another order is refused."""
    schedule = build("breadth_first", 2, 2, 2)
    rank = swapped(swapped(schedule, 1, Action("RECV_F", 1, 1), Action("RECV_F", 3, 0)), 1, Action("F", 1, 1), Action("F", 3, 0))
    with pytest.raises(ValueError, match=r"(RECV|SEND)_F\(stage"):
        validate(rank)
