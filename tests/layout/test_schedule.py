"""Schedules: valid on every size, refused when broken, known bubbles, torch's tables, drawing and command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.job.spec import Parallel
from hpc_mp.layout.schedule import SCHEDULES, Action, Kind, Reduce, Schedule, build, peak_in_flight, simulate, validate
from hpc_mp.layout.schedule.actions import compute
from hpc_mp.layout.schedule.draw import cell, draw, to_csv, to_dict

GOLDEN = Path(__file__).parents[1] / "golden"
REDUCE: tuple[Reduce, ...] = ("last", "each")


@st.composite
def sizes(draw: st.DrawFn, name: str) -> tuple[int, int, int]:
    """Pipeline ranks, microbatches, virtual stages."""
    pipeline = draw(st.integers(1, 6))
    if name == "interleaved_1f1b":
        return pipeline, pipeline * draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return pipeline, draw(st.integers(1, 12)), 1


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    return name, *draw(sizes(name))


def test_a_job_file_may_name_every_schedule() -> None:
    assert set(get_args(Parallel.model_fields["schedule"].annotation)) == set(SCHEDULES)


@given(requests(), st.sampled_from(REDUCE))
def test_every_schedule_is_valid(request: tuple[str, int, int, int], reduce: Reduce) -> None:
    name, pipeline, microbatches, virtual_stages = request
    schedule = build(name, pipeline, microbatches, virtual_stages, reduce)
    assert len(schedule) == pipeline
    validate(schedule, pipeline * virtual_stages, microbatches)
    reductions = sum(action.kind == "REDUCE" for actions in schedule for action in actions)
    assert reductions == pipeline * virtual_stages * (microbatches if reduce == "each" else 1)


@given(requests())
def test_bubble(request: tuple[str, int, int, int]) -> None:
    """Equal stages: (P − 1) / (M + P − 1) for GPipe and 1F1B; V stages per rank make it V times smaller against M."""
    name, pipeline, microbatches, virtual_stages = request
    timeline = simulate(build(name, pipeline, microbatches, virtual_stages))
    assert timeline.makespan == 3 * (virtual_stages * microbatches + pipeline - 1)
    assert timeline.bubble == pytest.approx((pipeline - 1) / (virtual_stages * microbatches + pipeline - 1))


@given(requests())
def test_in_flight(request: tuple[str, int, int, int]) -> None:
    name, pipeline, microbatches, virtual_stages = request
    ranks, total, chunks = range(pipeline), virtual_stages * microbatches, virtual_stages - 1
    wanted = {
        "gpipe": [microbatches for _ in ranks],
        "1f1b": [min(microbatches, pipeline - rank) for rank in ranks],
        "interleaved_1f1b": [min(total, 2 * (pipeline - rank - 1) + chunks * pipeline + 1) for rank in ranks],
    }
    schedule = build(name, pipeline, microbatches, virtual_stages)
    assert [peak_in_flight(actions) for actions in schedule] == wanted[name]


@given(requests())
def test_receives_are_posted_one_computation_early(request: tuple[str, int, int, int]) -> None:
    name, pipeline, microbatches, virtual_stages = request
    for actions in build(name, pipeline, microbatches, virtual_stages):
        for i, action in enumerate(actions):
            if action.kind.startswith("RECV"):
                computations = [a for a in actions[i:] if a.kind in ("F", "B")]
                earlier = any(a.kind in ("F", "B") for a in actions[:i])
                consumer = Action(action.kind[-1], action.stage, action.microbatch)  # type: ignore[arg-type]
                assert computations.index(consumer) == 1 or (computations[0] == consumer and not earlier)
            if action.kind.startswith("SEND"):
                producer = Action(action.kind[-1], action.stage, action.microbatch)  # type: ignore[arg-type]
                assert actions[i - 1] == producer


def test_1f1b_in_full() -> None:
    first, second = build("1f1b", 2, 2)
    assert [f"{a.kind}{a.microbatch}" for a in first] == [
        "F0", "SEND_F0", "RECV_B0", "F1", "SEND_F1", "RECV_B1", "B0", "B1", "REDUCE1"]
    assert [f"{a.kind}{a.microbatch}" for a in second] == [
        "RECV_F0", "F0", "RECV_F1", "B0", "SEND_B0", "F1", "B1", "SEND_B1", "REDUCE1"]


def test_stages_on_one_rank_exchange_nothing() -> None:
    (actions,) = build("interleaved_1f1b", 1, 2, virtual_stages=3)
    assert {a.kind for a in actions} == {"F", "B", "REDUCE"}


# --- negative controls -----------------------------------------------------------------------------------------------

SMALL: list[tuple[str, int, int, int]] = [("gpipe", 3, 4, 1), ("1f1b", 3, 4, 1), ("interleaved_1f1b", 2, 4, 2)]


def with_rank(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> Schedule:
    return (*schedule[:rank], actions, *schedule[rank + 1 :])


def swapped(schedule: Schedule, rank: int, a: Action, b: Action) -> Schedule:
    other = {a: b, b: a}
    return with_rank(schedule, rank, tuple(other.get(action, action) for action in schedule[rank]))


@pytest.mark.parametrize("request_", SMALL)
@pytest.mark.parametrize("reduce", REDUCE)
def test_every_action_is_needed_once(request_: tuple[str, int, int, int], reduce: Reduce) -> None:
    name, pipeline, microbatches, virtual_stages = request_
    schedule = build(name, pipeline, microbatches, virtual_stages, reduce)
    for rank, actions in enumerate(schedule):
        for i, action in enumerate(actions):
            twice = (*actions[:i], action, *actions[i:])
            with pytest.raises(ValueError, match=re.escape(str(action))):
                validate(with_rank(schedule, rank, twice), pipeline * virtual_stages, microbatches)
            if action.kind == "REDUCE" and Action("B", action.stage, microbatches - 1) in actions[i:]:
                continue  # may be missing: the stage's gradients are synchronised later as well
            with pytest.raises(ValueError, match=re.escape(str(action))):
                without = actions[:i] + actions[i + 1 :]
                validate(with_rank(schedule, rank, without), pipeline * virtual_stages, microbatches)


@pytest.mark.parametrize(("rank", "a", "b", "message"), [
    (0, Action("F", 0, 0), Action("B", 0, 0), r"deadlock: rank 0 at B\(stage 0, microbatch 0\)"),
    (2, Action("F", 2, 1), Action("B", 2, 1), "deadlock: .*rank 2 at B"),
    (0, Action("F", 0, 1), Action("F", 0, 2), r"SEND_F\(stage 0, microbatch 1\) stands before F"),
    (0, Action("SEND_F", 0, 1), Action("B", 0, 0), "rank 0 at B"),
    (1, Action("RECV_F", 1, 1), Action("RECV_F", 1, 2), "exchange in different orders"),
    (1, Action("RECV_B", 1, 0), Action("RECV_B", 1, 1), "exchange in different orders"),
    (1, Action("RECV_F", 1, 3), Action("F", 1, 3), r"deadlock: .*rank 1 at F\(stage 1, microbatch 3\)"),
    (1, Action("REDUCE", 1, 3), Action("SEND_B", 1, 3), r"REDUCE\(stage 1, microbatch 3\) holds up SEND_B\(stage 1"),
    (1, Action("REDUCE", 1, 3), Action("F", 1, 0), "does not directly follow"),
    (1, Action("REDUCE", 1, 3), Action("RECV_F", 1, 0), "does not directly follow"),
])
def test_swapped_actions_are_refused(rank: int, a: Action, b: Action, message: str) -> None:
    schedule = build("1f1b", 3, 4)
    assert {a, b} <= set(schedule[rank])
    with pytest.raises(ValueError, match=message):
        validate(swapped(schedule, rank, a, b), 3, 4)


def test_ranks_waiting_for_each_other_are_refused() -> None:
    """1F1B without its warm-up: stage 0 wants its backward before the second forward, GPipe's stage 1 after it."""
    kinds: tuple[Kind, ...] = ("F", "SEND_F", "RECV_B", "B")
    impatient = tuple(Action(kind, 0, m) for m in range(2) for kind in kinds)
    schedule = ((*impatient, Action("REDUCE", 0, 1)), build("gpipe", 2, 2)[1])
    both = r"deadlock: rank 0 at B\(stage 0, microbatch 0\), rank 1 at F\(stage 1, microbatch 1\)"
    with pytest.raises(ValueError, match=both):
        validate(schedule, 2, 2)
    with pytest.raises(ValueError, match=r"B\(stage 0, microbatch 0\) can never start"):
        simulate(schedule)


def test_wrong_rank_and_superfluous_actions_are_refused() -> None:
    first, second = build("1f1b", 2, 2)
    with pytest.raises(ValueError, match=r"F\(stage 0, microbatch 0\) is on rank 1, its stage on rank 0"):
        validate((first, (*second, first[0])), 2, 2)
    with pytest.raises(ValueError, match=r"B\(stage 0, microbatch 2\) stands 1 times, expected 0"):
        validate(build("1f1b", 2, 3), 2, 2)


@pytest.mark.parametrize(("arguments", "message"), [
    (("1f1b", 0, 4), "pipeline = 0: must be at least 1"),
    (("gpipe", 2, 0), "microbatches = 0: must be at least 1"),
    (("gpipe", 2, 4, 2), "virtual_stages = 2: gpipe has one stage per rank"),
    (("1f1b", 2, 4, 2), "virtual_stages = 2: 1f1b has one stage per rank"),
    (("interleaved_1f1b", 4, 6, 2), r"multiple of pipeline\(4\); 6 % 4 = 2. Use 8 microbatches"),
    (("zero_bubble", 2, 4), f"is not a schedule. Use one of {', '.join(SCHEDULES)}"),
])
def test_wrong_requests_are_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(HpcMpError, match=message):
        build(*arguments)


# --- times -----------------------------------------------------------------------------------------------------------


def test_times_by_hand() -> None:
    timeline = simulate(build("gpipe", 2, 1), forward={0: 1, 1: 2}, backward={0: 3, 1: 4}, latency=10)
    first, last = ([(slot.start, slot.end) for slot in slots] for slots in timeline.ranks)
    assert first == [(0, 1), (27, 30)]
    assert last == [(11, 13), (13, 17)]
    assert timeline.makespan == 30
    assert timeline.bubble == pytest.approx(1 - 10 / 60)


def test_a_slow_stage_holds_up_the_pipeline() -> None:
    schedule = build("1f1b", 4, 16)
    slow = simulate(schedule, forward={0: 1, 1: 1, 2: 2, 3: 1}, backward=2)
    assert slow.makespan > simulate(schedule).makespan
    assert slow.makespan >= 16 * (2 + 2)


# --- torch as an oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "torch_name", "pipeline", "microbatches", "virtual_stages"), [
    ("gpipe", "GPipe", 4, 6, 1),
    ("interleaved_1f1b", "Interleaved1F1B", 2, 4, 2),
    ("interleaved_1f1b", "Interleaved1F1B", 4, 8, 2),
    ("interleaved_1f1b", "Interleaved1F1B", 4, 4, 3),
])
def test_order_equals_torch(name: str, torch_name: str, pipeline: int, microbatches: int, virtual_stages: int) -> None:
    oracle = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    theirs = oracle.get_schedule_ops(torch_name, pipeline, microbatches, virtual_stages)
    ours = compute(build(name, pipeline, microbatches, virtual_stages))
    computing = re.compile(r"\d+[FB]\d+")  # GPipe's table also says when gradients are reduced
    assert [[str(op) for op in rank if computing.fullmatch(str(op))] for rank in theirs] == [
        list(map(cell, rank)) for rank in ours]


def test_torch_reads_the_csv() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, "_Action"):
        pytest.skip("torch's private _Action is gone")
    lines = to_csv(build("1f1b", 3, 4)).splitlines()
    read = [[schedules._Action.from_str(text) for text in line.split(",")] for line in lines]
    assert [[str(op) for op in rank if op is not None] for rank in read] == [
        [text for text in line.split(",") if text] for line in lines]


# --- drawing and command ---------------------------------------------------------------------------------------------


def test_csv_golden() -> None:
    assert to_csv(build("1f1b", 4, 4)) == (
        "0F0,0F1,0F2,0F3,,,,0B0,,0B1,,0B2,,0B3\n"
        ",1F0,1F1,1F2,,,1B0,1F3,1B1,,1B2,,1B3,\n"
        ",,2F0,2F1,,2B0,2F2,2B1,2F3,2B2,,2B3,,\n"
        ",,,3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,,,\n"
    )


@pytest.mark.parametrize(("file", "request_"), [
    ("schedule_1f1b.txt", ("1f1b", 4, 8, 1)), ("schedule_interleaved.txt", ("interleaved_1f1b", 4, 8, 2)),
])
def test_drawing_golden(file: str, request_: tuple[str, int, int, int]) -> None:
    text = draw(build(*request_), width=80).plain
    assert max(map(len, text.splitlines())) <= 80
    assert text + "\n" == (GOLDEN / file).read_text(encoding="utf-8")


def test_drawing_colours_forward_and_backward() -> None:
    text = draw(build("gpipe", 1, 1))
    drawn = {(text.plain[span.start : span.end].strip(), span.style) for span in text.spans}
    assert drawn == {("F0", "cyan"), ("B0", "green")}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["schedule", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_command_prints_one_json_document() -> None:
    tree = json.loads(run("--pp", "4", "--microbatches", "8", "--json"))
    schedule = build("1f1b", 4, 8)
    assert tree["ranks"] == to_dict(schedule)["ranks"]
    assert (tree["schedule"], tree["pipeline"], tree["microbatches"], tree["virtual_stages"]) == ("1f1b", 4, 8, 1)
    assert tree["bubble"] == simulate(schedule).bubble
    assert tree["peak_in_flight"] == [4, 3, 2, 1]
    again = tuple(tuple(Action(**action) for action in rank["actions"]) for rank in tree["ranks"])
    assert again == schedule


def test_command_prints_table_drawing_and_csv() -> None:
    request = ("--schedule", "interleaved_1f1b", "--pp", "2", "--microbatches", "4", "--virtual-stages", "2")
    assert run(*request, "--csv") == to_csv(build("interleaved_1f1b", 2, 4, 2))
    drawing = run(*request, "--draw")
    assert draw(build("interleaved_1f1b", 2, 4, 2), 80).plain in drawing
    table = run(*request)
    assert "0F0 0SEND_F0" in table and "3RECV_B" not in table  # the last stage receives no gradient
    for text in (drawing, table):
        assert "idle (bubble): 11.1%" in text
        assert text.splitlines()[-1].endswith("5, 3")


@pytest.mark.parametrize("arguments", [
    ["--pp", "2", "--microbatches", "2", "--csv", "--json"],
    ["--pp", "4", "--microbatches", "6", "--schedule", "interleaved_1f1b"],
    ["--pp", "4", "--microbatches", "6", "--schedule", "1F1B"],
    ["--pp", "0", "--microbatches", "6"],
])
def test_command_refuses_wrong_input(arguments: list[str]) -> None:
    assert isinstance(CliRunner().invoke(cli, ["schedule", *arguments]).exception, HpcMpError)
