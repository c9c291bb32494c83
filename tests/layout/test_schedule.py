"""Schedules by name: valid on every size or refused with the reason, known bubbles, activations held, torch's orders."""

import re
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import NAMES, Request, requests
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.schedule import Action, Reduce, build, peak_in_flight, posted_ahead, simulate, validate
from hpc_mp.layout.schedule.actions import COMPUTE, compute
from hpc_mp.layout.schedule.generators import ORDERS
from hpc_mp.layout.schedule.names import STAGES_PER_RANK
from hpc_mp.layout.schedule.table import cell
from hpc_mp.layout.schedule.validate import check_streams, own_stream

REDUCE: tuple[Reduce, ...] = ("last", "each")


def test_a_job_file_may_name_every_schedule() -> None:
    assert set(STAGES_PER_RANK) == set(ORDERS)


def check_valid(request: Request, reduce: Reduce) -> None:
    name, pipeline, microbatches, virtual_stages = request
    schedule = build(name, pipeline, microbatches, virtual_stages, reduce)
    assert (len(schedule.ranks), schedule.microbatches) == (pipeline, microbatches)
    validate(schedule)
    reductions = sum(action.kind == "REDUCE" for actions in schedule.ranks for action in actions)
    assert reductions == schedule.stages * (microbatches if reduce == "each" else 1)


@given(requests(), st.sampled_from(REDUCE))
def test_every_schedule_is_valid(request: Request, reduce: Reduce) -> None:
    check_valid(request, reduce)


@pytest.mark.prove
@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_valid_or_refused_with_the_reason(name: str) -> None:
    refused = 0
    for pipeline, microbatches, virtual_stages in product(range(1, 9), range(1, 17), range(1, 4)):
        try:
            build(name, pipeline, microbatches, virtual_stages)
        except HpcMpError as error:
            assert re.search(r"a multiple of pipeline\(\d\); \d+ % \d = [1-9]|has (one stage|two stages) per rank", str(error))
            refused += 1
            continue
        for reduce in REDUCE:
            check_valid((name, pipeline, microbatches, virtual_stages), reduce)
    divisible = sum(m % p == 0 for p, m in product(range(1, 9), range(1, 17)))
    assert refused == {"interleaved_1f1b": 3 * (128 - divisible), "breadth_first": 0, "zero_bubble_v": 128}.get(name, 256)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "breadth_first", "zero_bubble_v"])
def test_a_large_schedule_is_proved_in_seconds(name: str) -> None:
    schedule = build(name, 16, 256, 4 if STAGES_PER_RANK[name] is None else 1)
    begin = time.process_time()
    validate(schedule)
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(("name", "virtual_stages", "held"), table(__file__, "schedule.toml", "stages"))
def test_who_holds_which_stages(name: str, virtual_stages: int, held: list[list[int]]) -> None:
    schedule = build(name, 3, 3, virtual_stages)
    assert [[*schedule.stages_of(rank)] for rank in range(3)] == held
    assert {action.stage for action in schedule.ranks[2]} == set(held[2])


@given(requests())
def test_bubble(request: Request) -> None:
    """Over equal stages, a forward taking 1, a backward 2, its parts 1 each: what a rank waits on top of its own work."""
    name, p, m, v = request
    schedule = build(name, p, m, v)
    looped = 3 * (p - 1)
    wait = {
        "breadth_first": looped + 3 * (v - 1) * max(0, p - m),  # with fewer microbatches than ranks each further stage waits
        "zero_bubble": max(p - 1, 2 * p - 1 - m),
        "zero_bubble_v": max(p - 1, 2 * (2 * p - 1 - m)),
    }.get(name, looped)
    work = 3 * m * schedule.stages // p
    timeline = simulate(schedule)
    assert timeline.makespan == work + wait
    assert timeline.bubble == pytest.approx(wait / (work + wait))


TIMES = st.integers(1, 9)


@given(st.integers(1, 6), st.integers(0, 6), TIMES, TIMES, TIMES)
def test_bubble_of_zero_bubble(pipeline: int, more: int, forward: int, backward: int, weight: int) -> None:
    """ZB-H1: (P − 1) (F + I − W), from P microbatches on, where a W takes no longer than an F and an I (arXiv:2401.10241)."""
    microbatches, weight = pipeline + more, min(forward, backward, weight)
    timeline = simulate(build("zero_bubble", pipeline, microbatches), {"F": forward, "I": backward, "W": weight})
    busy = microbatches * (forward + backward + weight)
    assert timeline.makespan == busy + (pipeline - 1) * (forward + backward - weight)
    one = simulate(build("1f1b", pipeline, microbatches), {"F": forward, "B": backward + weight})
    assert one.makespan == busy + (pipeline - 1) * (forward + backward + weight)


@given(st.integers(1, 6), st.integers(0, 6))
def test_zero_bubble_v_never_waits_once_it_has_begun(pipeline: int, more: int) -> None:
    """From 2 P − 1 microbatches on, where F, I and W take equally long: P − 1 forwards of one stage is all that a rank waits."""
    for slots in simulate(build("zero_bubble_v", pipeline, 2 * pipeline - 1 + more)).ranks:
        assert slots[-1].end - slots[0].start == sum(slot.end - slot.start for slot in slots)


@given(requests())
def test_in_flight(request: Request) -> None:
    """Microbatches whose activations a rank holds at once, each of its stages counted."""
    name, p, m, v = request
    wanted = {
        "gpipe": [m for _ in range(p)],
        "simple": [m for _ in range(p)],
        "1f1b": [min(m, p - rank) for rank in range(p)],
        "interleaved_1f1b": [min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p)],
        "breadth_first": [v * m for _ in range(p)],
        "zero_bubble": [min(m, p) for _ in range(p)],
        "zero_bubble_v": [min(2 * p, 2 * m, m + rank + 1) for rank in range(p)],
    }
    assert [peak_in_flight(actions) for actions in build(name, p, m, v).ranks] == wanted[name]


def test_zero_bubble_waits_for_gradients_as_1f1b_does() -> None:
    """Forwards whose input gradient is still to come: P − r on rank r, the order of F and I being that of 1F1B's F and B."""
    for whole, split in zip(compute(build("1f1b", 4, 9)), compute(build("zero_bubble", 4, 9)), strict=True):
        assert [a.kind + str(a.microbatch) for a in whole] == [
            a.kind.replace("I", "B") + str(a.microbatch) for a in split if a.kind != "W"]


@given(requests())
def test_sends_follow_and_receives_precede_their_computations(request: Request) -> None:
    consumers = {"RECV_F": ("F",), "RECV_B": ("B", "I"), "SEND_F": ("F",), "SEND_B": ("B", "I")}
    for actions in build(*request).ranks:
        for i, action in enumerate(actions):
            if action.kind not in consumers:
                continue
            computed = [Action(kind, action.stage, action.microbatch) for kind in consumers[action.kind]]  # type: ignore[arg-type]
            assert actions[i - 1 if action.kind.startswith("SEND") else i + 1] in computed


@given(requests())
def test_messages_through_the_host_are_posted_one_computation_early(request: Request) -> None:
    """In both orders nothing but receives moves, and ranks that post so do not block each other."""
    schedule = build(*request)
    ahead = replace(schedule, ranks=tuple(tuple(posted_ahead(actions)) for actions in schedule.ranks))
    check_streams(ahead, own_stream)
    for actions, posted in zip(schedule.ranks, ahead.ranks, strict=True):
        order = [action for action in posted if action.kind in COMPUTE]
        for action in actions:
            after = [a for a in posted[posted.index(action):] if a.kind in COMPUTE]
            consumer = {"RECV_F": ("F",), "RECV_B": ("B", "I")}.get(action.kind, ())
            if consumer:
                place = next(i for i, a in enumerate(order) if a.kind in consumer and (a.stage, a.microbatch) == (
                    action.stage, action.microbatch))
                assert after[0] == order[max(0, place - 1)]
        assert [a for a in posted if not a.kind.startswith("RECV")] == [a for a in actions if not a.kind.startswith("RECV")]


@pytest.mark.parametrize(("name", "reduce", "ranks"), table(__file__, "schedule.toml", "in_full"))
def test_schedules_in_full(name: str, reduce: Reduce, ranks: list[str]) -> None:
    assert [" ".join(f"{a.kind}{a.microbatch}" for a in actions) for actions in build(name, 2, 2, reduce=reduce).ranks] == ranks


@pytest.mark.parametrize(("name", "virtual_stages"), [("interleaved_1f1b", 3), ("zero_bubble_v", 1), ("breadth_first", 2)])
def test_stages_on_one_rank_exchange_nothing(name: str, virtual_stages: int) -> None:
    (actions,) = build(name, 1, 2, virtual_stages).ranks
    assert {a.kind for a in actions} <= {"F", "B", "I", "W", "REDUCE"}


def test_the_last_rank_of_a_v_turns_without_a_message() -> None:
    last = build("zero_bubble_v", 3, 5).ranks[2]
    assert {a.stage for a in last} == {2, 3}
    assert {a for a in last if a.kind in ("SEND_F", "RECV_B") and a.stage == 2} == set()
    assert {a for a in last if a.kind in ("SEND_B", "RECV_F") and a.stage == 3} == set()


@pytest.mark.parametrize(("arguments", "message"), [
    *table(__file__, "schedule.toml", "requests"),
    (("zb", 2, 4), f"is not a schedule. Use one of {', '.join(STAGES_PER_RANK)}, or a table")])
def test_wrong_requests_are_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(HpcMpError, match=message):
        build(*arguments)


def test_the_table_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs/user/schedules.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    stated = {name: (row[-2], row[-1]) for row in rows[1:] for name in re.findall("`(.+?)`", row[0])}
    assert set(stated) == set(STAGES_PER_RANK)
    for name, (bubble, held) in stated.items():
        schedule = build(name, 4, 8, 2 if STAGES_PER_RANK[name] is None else 1)
        assert bubble == f"{simulate(schedule).bubble:.1%}".replace("%", " %")
        assert float(held) == peak_in_flight(schedule.ranks[0]) / (schedule.stages / 4)


# --- times -----------------------------------------------------------------------------------------------------------


def test_times_by_hand() -> None:
    timeline = simulate(build("gpipe", 2, 1), {"F": {0: 1, 1: 2}, "B": {0: 3, 1: 4}}, latency=10)
    first, last = ([(slot.start, slot.end) for slot in slots] for slots in timeline.ranks)
    assert first == [(0, 1), (27, 30)]
    assert last == [(11, 13), (13, 17)]
    assert timeline.makespan == 30
    assert timeline.bubble == pytest.approx(1 - 10 / 60)


def test_between_stages_of_one_rank_nothing_travels() -> None:
    assert simulate(build("breadth_first", 1, 1, 2), latency=10).makespan == 6
    down_and_back = simulate(build("zero_bubble_v", 2, 1), latency=10)
    assert down_and_back.makespan == 4 * 10 + 10  # four times over the link, and F, F, F, F, I, I, W, I, I, W


def test_a_gradient_leaves_before_its_weights_are_done() -> None:
    timeline = simulate(build("zero_bubble", 2, 1), {"F": 1, "I": 2, "W": 5}, latency=10)
    first, last = ([(slot.action.kind, slot.start, slot.end) for slot in slots] for slots in timeline.ranks)
    assert last == [("F", 11, 12), ("I", 12, 14), ("W", 14, 19)]
    assert first == [("F", 0, 1), ("I", 24, 26), ("W", 26, 31)]


def test_a_slow_stage_holds_up_the_pipeline() -> None:
    schedule = build("1f1b", 4, 16)
    slow = simulate(schedule, {"F": {0: 1, 1: 1, 2: 2, 3: 1}, "B": 2})
    assert slow.makespan > simulate(schedule).makespan
    assert slow.makespan >= 16 * (2 + 2)


# --- torch as an oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "torch_name", "pipeline", "microbatches", "virtual_stages"),
                         table(__file__, "schedule.toml", "of_torch"))
def test_order_equals_torch(name: str, torch_name: str, pipeline: int, microbatches: int, virtual_stages: int) -> None:
    oracle = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    theirs = oracle.get_schedule_ops(torch_name, pipeline, microbatches, virtual_stages)
    ours = compute(build(name, pipeline, microbatches, virtual_stages))
    computing = re.compile(r"\d+[FBIW]\d+")  # GPipe's table also says when gradients are reduced
    assert [[str(op) for op in rank if computing.fullmatch(str(op))] for rank in theirs] == [
        list(map(cell, rank)) for rank in ours]
