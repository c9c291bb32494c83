"""The validator: whatever is spoilt in a schedule is refused with the action named; what NCCL's rule lets through."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from schedules import SMALL, Request, requests, swapped, with_rank
from tables import table

from hpc_mp.layout.schedule import Action, Kind, Reduce, Schedule, build, posted_ahead, simulate, validate
from hpc_mp.layout.schedule.actions import COMPUTE, Channel, consumed
from hpc_mp.layout.schedule.names import STAGES_PER_RANK
from hpc_mp.layout.schedule.validate import check_hosts, check_streams, own_stream

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


def ahead(schedule: Schedule) -> Schedule:
    """Every receive one computation early, as messages through the host are posted."""
    return replace(schedule, ranks=tuple(tuple(posted_ahead(actions)) for actions in schedule.ranks))


@pytest.mark.parametrize(("schedule", "halves"), [
    (build("1f1b", 2, 4), (r"SEND_F\(stage 0, microbatch 1\)", r"SEND_B\(stage 1, microbatch 0\)")),
    (ahead(build("1f1b", 2, 4)), (r"RECV_B\(stage 0, microbatch 0\)", r"RECV_F\(stage 1, microbatch 1\)"))],
    ids=["just in time", "ahead"])
def test_one_stream_for_all_messages_of_a_rank_blocks(schedule: Schedule, halves: tuple[str, str]) -> None:
    """1F1B on one communicator: rank 0 is at its second output when rank 1 is at its first gradient."""
    both = (r"deadlock: rank 0 at B\(stage 0, microbatch 0\), rank 1 at F\(stage 1, microbatch 1\); "
            rf"under way: rank 0 in {halves[0]}, rank 1 in {halves[1]}")
    with pytest.raises(ValueError, match=both):
        check_streams(schedule, shared_stream)


def test_one_stream_does_where_no_receive_stands_before_a_send() -> None:
    """The control: GPipe with receives just in time runs on one stream, so the rule does not refuse everything."""
    check_streams(build("gpipe", 3, 4), shared_stream)
    with pytest.raises(ValueError, match="deadlock"):
        check_streams(ahead(build("gpipe", 3, 4)), shared_stream)


@pytest.mark.parametrize(("request_", "receive"), [
    (("gpipe", 2, 2, 1), r"RECV_B\(stage 0, microbatch 0\) of rank 0 .* depends on F\(stage 0, microbatch 1\), 1 actions later"),
    (("1f1b", 4, 2, 1), r"RECV_B\(stage \d, microbatch \d\) of rank \d"),
    (("zero_bubble_v", 2, 1, 1), r"RECV_\w\(stage \d, microbatch \d\)")])
def test_a_host_that_waits_at_a_receive_posted_early_waits_for_ever(request_: Request, receive: str) -> None:
    check_hosts(build(*request_))
    with pytest.raises(ValueError, match=receive):
        check_hosts(ahead(build(*request_)))


@pytest.mark.prove
@pytest.mark.parametrize(("name", "lists", "stopped"), [
    ("gpipe", 128, 112), ("1f1b", 128, 28), ("zero_bubble", 128, 28), ("interleaved_1f1b", 126, 18), ("breadth_first", 384, 336),
    ("zero_bubble_v", 128, 49)])
def test_no_schedule_stops_where_a_host_waits(name: str, lists: int, stopped: int) -> None:
    """All with up to 8 pipeline ranks, 16 microbatches and 3 virtual stages, against their lists with early receives."""
    virtual = (2,) if name == "zero_bubble_v" else range(1, 4) if STAGES_PER_RANK[name] is None else (1,)
    counts = [0, 0]
    for request in product((name,), range(1, 9), range(1, 17), virtual):
        if name != "interleaved_1f1b" or request[2] % request[1] == 0:
            schedule = build(*request)
            validate(schedule)
            counts[0] += 1
            try:
                check_hosts(ahead(schedule))
            except ValueError:
                counts[1] += 1
    assert counts == [lists, stopped]


def blocked(schedule: Schedule) -> int:
    """Number of receives at which a host that waits alone waits for ever, by execution."""
    return sum(not runs(schedule, rank, place) for rank, actions in enumerate(schedule.ranks)
               for place, action in enumerate(actions) if action.kind.startswith("RECV"))


def runs(schedule: Schedule, waiting: int, where: int) -> bool:
    """Execute, while the host of one rank waits at one of its receives; the others stop at computations without their input."""
    at, posted = [0] * len(schedule.ranks), set[Action]()
    while True:
        before = [*at]
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                message = consumed(action, schedule.stages)
                halves = {message.send, message.receive} if message and message.travels(schedule.placement) else set()
                if action.kind in COMPUTE and not halves <= posted:
                    break
                if action.kind not in COMPUTE:
                    posted.add(action)
                    if (rank, at[rank]) == (waiting, where) and not halves <= posted:
                        break
                at[rank] += 1
        if at == before:
            return all(place == len(actions) for place, actions in zip(at, schedule.ranks, strict=True))


@given(requests())
@settings(max_examples=20)
def test_the_proof_of_hosts_is_what_execution_gives(request: Request) -> None:
    name, pipeline, microbatches, virtual = request
    small = name, min(pipeline, 4), min(pipeline, 4) if name == "interleaved_1f1b" else min(microbatches, 4), virtual
    schedule = build(*small)
    assert blocked(schedule) == 0
    if blocked(ahead(schedule)):
        with pytest.raises(ValueError, match="waits for ever"):
            check_hosts(ahead(schedule))
    else:
        check_hosts(ahead(schedule))


def test_a_circle_of_messages_on_one_communicator_is_refused() -> None:
    """Two stages per rank on two ranks: with one stream per pair of ranks, forwards of both ranks stand before each other's."""
    def one_stream_per_pair(channel: tuple[int, int, str]) -> frozenset[int]:
        return frozenset(channel[:2])

    schedule = build("interleaved_1f1b", 2, 4, 2)
    with pytest.raises(ValueError, match=r"under way: rank 0 in SEND_F\(stage 0, microbatch 1\), rank 1 in SEND_F\(stage 1"):
        check_streams(schedule, one_stream_per_pair)  # type: ignore[arg-type]
    check_streams(schedule, own_stream)


def test_messages_of_a_channel_are_in_one_order_on_both_sides() -> None:
    """Two stages that rank 0 sends to rank 1 are one channel: the rank that consumes them in another order is refused."""
    schedule = build("breadth_first", 2, 2, 2)
    rank = swapped(swapped(schedule, 1, Action("RECV_F", 1, 1), Action("RECV_F", 3, 0)), 1, Action("F", 1, 1), Action("F", 3, 0))
    with pytest.raises(ValueError, match=r"(RECV|SEND)_F\(stage"):
        validate(rank)
