"""The figures of a report: curves, rank grid, executed pipeline, memory, and numbers in words."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reported import Run

from hpc_mp.layout.placement import Degrees, place
from hpc_mp.layout.schedule import build
from hpc_mp.layout.schedule.table import to_csv
from hpc_mp.report.axes import Scale, rounds, ticks
from hpc_mp.report.colours import luminance
from hpc_mp.report.curves import HEIGHT, LABEL_WIDTH, PANELS, RIGHT, TOP, WIDTH, Resume, curve, labelled, thinned
from hpc_mp.report.facts import read_facts
from hpc_mp.report.gantt import Bubble, gantt
from hpc_mp.report.grid import grid, shade
from hpc_mp.report.memory import memory
from hpc_mp.rundir.plan import ChunkCounts


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# --- curves ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_ends_and_spikes(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thinned(points, 600)
    assert len(kept) <= 600
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert {max(values), min(values)} <= {value for _, value in kept}
    assert list(kept) == sorted(set(kept))


def test_a_slow_first_step_leaves_the_scale_and_is_said(run: Run) -> None:
    run.train(1, 20)
    metrics = list(read_facts(run.run).metrics)
    metrics[0] = replace(metrics[0], step_time_s=30.0)
    (panel,) = (panel for panel in PANELS if panel.title == "Step time")
    drawn = curve(panel, metrics)
    assert drawn.notes == ("1 step above the scale, the highest 30 at step 1",)
    assert drawn.points[0][1] == TOP and drawn.values[0] == 30.0
    assert all(TOP < y < HEIGHT for _, y in drawn.points[1:])


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(1, 10))
def test_ticks_are_few_ordered_and_inside(low: float, width: float, most: int) -> None:
    high = low + width
    found = rounds(low, high, most)
    assert len(found) <= most + 1
    assert list(found) == sorted(set(found))
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert all(low - slack <= value <= high + slack for value in found)


def test_tick_labels() -> None:
    def labels(low: float, high: float, whole: bool = False) -> list[str]:
        return [tick.label for tick in ticks(Scale(low, high, 0, 100), 5, whole)]

    assert labels(0, 1) == ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert labels(5.1, 6.3) == ["5.5", "6.0"]
    assert labels(0, 52_000) == ["0", "20k", "40k"]
    assert labels(1, 3, whole=True) == ["1", "2", "3"]
    assert labels(7, 7, whole=True) == ["7"]
    assert labels(0, 3e-7)[-1] == "3e-07"
    assert [tick.at for tick in ticks(Scale(0, 1, 0, 100), 2)] == [0, 50, 100]


# --- the rank grid ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "per_node", "density"),
                         [(1, 1, "roomy"), (2, 4, "roomy"), (8, 8, "close"), (64, 8, "dense")])
def test_grid_from_1_to_512_ranks(nodes: int, per_node: int, density: str) -> None:
    world = nodes * per_node
    drawn = grid(place(Degrees(2, 4, world // 8) if world >= 8 else Degrees(), "DPT", per_node), {})
    assert (len(drawn.nodes), drawn.density) == (nodes, density)
    assert [cell.rank for node in drawn.nodes for cell in node.cells] == list(range(world))


@pytest.mark.parametrize(("at", "shown"), [
    ((100,), [1]), ((100, 103), [1, 2]), ((100, 103, 106), [2, 3]), ((500, 520), [2]), ((524,), [1]), ((53, 55, 526), [2, 3]),
    (tuple(range(60, 520, 80)), [2, 3, 4, 5, 6]), (tuple(range(60, 520, 3)), None)])
def test_labels_of_attempts_do_not_overlap(at: tuple[float, ...], shown: list[int] | None) -> None:
    drawn = labelled([Resume(place, number) for number, place in enumerate(at, 1)], WIDTH - RIGHT)
    assert [each.at for each in drawn] == list(at), "every line is there"
    labels = [(each.label, each.attempt) for each in drawn if each.label is not None]
    assert all(left >= 0 and left + LABEL_WIDTH <= WIDTH - RIGHT for left, _ in labels)
    assert all(right - left >= LABEL_WIDTH for (left, _), (right, _) in pairwise(labels))
    assert [attempt for _, attempt in labels] == shown if shown is not None else len(labels) >= 6


def test_grid_says_who_talks_to_whom(run: Run) -> None:
    run.start(host="vm7")
    drawn = grid(run.placement, {start.rank: start for start in read_facts(run.run).starts})
    assert [(node.name, node.host) for node in drawn.nodes] == [("node0", "vm7"), ("node1", "vm7")]
    five = drawn.nodes[1].cells[1]
    assert (five.rank, five.label) == (5, "d1 p0 t1")
    assert five.tip == "rank 5 on node1, local rank 1\ndp 1 pp 0 tp 1\nreplicas: 1 5\npipeline: 5 7\ntensor group: 4 5"
    assert {cell.rank for node in drawn.nodes for cell in node.cells if set(cell.groups) & set(five.groups)} == {1, 4, 5, 7}
    assert len({cell.shade for node in drawn.nodes for cell in node.cells}) == 2


@given(st.integers(1, 64))
def test_ink_reads_on_every_shade(stages: int) -> None:
    def channel(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        return luminance(tuple(int(digits[i : i + 2], 16) for i in (0, 2, 4)))

    for stage in range(stages):
        found = shade(stage, stages)
        light, dark = sorted((channel(found.fill), channel(found.ink)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.3, f"WCAG contrast of stage {stage} of {stages}"


# --- the pipeline as executed ----------------------------------------------------------------------------------------


def gantt_of(run: Run) -> SimpleNamespace:
    drawn = gantt(read_facts(run.run).traces, run.placement, run.spec)
    assert drawn is not None
    return drawn


def bubble_of(run: Run) -> Bubble:
    bubble = gantt_of(run).bubble
    assert bubble is not None
    return bubble


@pytest.mark.parametrize(("schedule", "microbatches", "virtual_stages", "ideal", "formula"), [
    ("1f1b", 4, 1, 3 / 7, "(4 − 1) / (4 + 4 − 1)"),
    ("gpipe", 4, 1, 3 / 7, "(4 − 1) / (4 + 4 − 1)"),
    ("interleaved_1f1b", 4, 2, 3 / 11, "(4 − 1) / (8 + 4 − 1)"),
    ("zero_bubble", 4, 1, 3 / 15, "(4 − 1) (F + I − W) / (4 (F + I + W) + (4 − 1) (F + I − W))"),
    ("zero_bubble_v", 8, 1, 3 / 51, "(4 − 1) F / (16 (F + I + W) + (4 − 1) F) if F, I and W take equal time")])
def test_an_ideal_run_has_the_ideal_bubble(tmp_path: Path, schedule: str, microbatches: int, virtual_stages: int, ideal: float,
                                           formula: str) -> None:
    run = Run(tmp_path, pipeline=4, schedule=schedule, microbatches=microbatches, virtual_stages=virtual_stages)
    run.trace()
    drawn, bubble = gantt_of(run), bubble_of(run)
    assert bubble.ideal == pytest.approx(ideal, abs=1e-6)
    assert bubble.measured == pytest.approx(ideal, abs=1e-6)  # unix seconds have microseconds
    assert bubble.own_times == pytest.approx(ideal, abs=1e-6)
    assert bubble.formula == formula
    assert [row.label for row in drawn.executed.rows] == [f"rank {r}" for r in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert {row.idle for row in drawn.executed.rows} == {f"{100 * ideal:.1f} %"}
    assert ("weight" in {box.kind for row in drawn.executed.rows for box in row.boxes}) == schedule.startswith("zero_bubble")


def test_a_table_that_is_gone_leaves_the_pipeline_as_executed(tmp_path: Path) -> None:
    run = Run(tmp_path, pipeline=4)
    run.trace()
    facts = read_facts(run.run)
    table = run.spec.parallel.model_copy(update={"schedule": str(tmp_path / "mine.csv")})
    spec = run.spec.model_copy(update={"parallel": table})
    (tmp_path / "mine.csv").write_text(to_csv(build("1f1b", 4, 4)))
    kept = gantt(facts.traces, run.placement, spec)
    (tmp_path / "mine.csv").unlink()
    lost = gantt(facts.traces, run.placement, spec)
    assert kept is not None and kept.bubble is not None and kept.bubble.formula == "the table's"
    assert kept.bubble.ideal == pytest.approx(3 / 7, abs=1e-6)
    assert lost is not None and lost.bubble is None and lost.executed == kept.executed


def test_waiting_shows_in_the_bubble(run: Run) -> None:
    run.trace(wait=0.045)
    drawn, bubble = gantt_of(run), bubble_of(run)
    assert bubble.ideal == pytest.approx(0.2, abs=1e-5)
    assert bubble.own_times == pytest.approx(0.2, abs=1e-5)
    assert bubble.measured == pytest.approx(1 - 0.120 / 0.175, abs=1e-6), "stage 1 ends at 130 + 45 ms"
    assert len([row for row in drawn.executed.rows if any(box.kind == "wait" for box in row.boxes)]) == 4


def test_unequal_stages_are_told_from_waiting(run: Run) -> None:
    run.trace()
    for at in run.placement.ranks:
        if at.pp == 0:
            document = json.loads(run.run.trace(at.rank).read_text())
            for action in document["actions"]:
                if action[0] in ("F", "B"):
                    action[4] -= (action[4] - action[3]) / 2
            run.run.trace(at.rank).write_text(json.dumps(document))
    bubble = bubble_of(run)
    assert bubble.ideal < bubble.own_times <= bubble.measured + 1e-6


def test_boxes_are_the_actions(run: Run) -> None:
    run.trace()
    row = gantt_of(run).executed.rows[1]
    assert (row.label, row.detail) == ("rank 2", "d0 p1 t0")
    computed = [(box.kind[0].upper(), box.text) for box in row.boxes if box.kind in ("forward", "backward")]
    assert computed == [(kind, str(m)) for m in range(4) for kind in "FB"]
    assert row.boxes[1].tip == "forward of microbatch 0, stage 1\n10 ms, from 10 ms to 20 ms"
    assert all(one.x + one.width <= two.x + 0.2 for one, two in zip(row.boxes, row.boxes[1:], strict=False))


def test_many_ranks_are_drawn_by_example_and_many_microbatches_without_boxes(tmp_path: Path) -> None:
    run = Run(tmp_path, nodes=8, per_node=8, tensor=4, pipeline=4, microbatches=256)
    run.complete()
    drawn = gantt_of(run)
    assert len(drawn.executed.rows) == 8
    assert drawn.shown == "2 of the 16 pipelines (one for every replica and tensor rank)"
    assert all(set(row.slivers) >= {"forward", "backward"} for row in drawn.executed.rows)
    assert bubble_of(run).measured == pytest.approx(3 / 259, abs=1e-4)
    assert len(run.page().source) < 500_000


def test_a_rank_without_a_trace_is_named(run: Run) -> None:
    run.trace(skip=(2,))
    drawn = gantt_of(run)
    assert drawn.shown == "no trace yet of rank 2"
    assert len(drawn.executed.rows) == 7


def test_traces_of_an_earlier_attempt_are_left_out(run: Run) -> None:
    run.start()
    run.train(1, 10)
    run.trace()
    assert len(read_facts(run.run).traces) == 8
    run.resume(10)
    assert read_facts(run.run).traces == {}
    assert "No trace yet" in run.page().text


def test_no_pipeline_no_bubble(tmp_path: Path) -> None:
    run = Run(tmp_path, nodes=1, per_node=1, tensor=1, pipeline=1, microbatches=1).complete()
    drawn = gantt_of(run)
    assert drawn.bubble is None and drawn.ideal is None
    page = run.page()
    assert len(page.all("svg", class_="gantt")) == 1
    assert "Pipeline idle" not in page.text
    assert "1 rank on 1 node" in page.text


# --- memory ----------------------------------------------------------------------------------------------------------


def test_bars_add_up_to_the_peak(run: Run) -> None:
    run.trace()
    drawn = memory(read_facts(run.run).traces, run.placement)
    assert drawn is not None and len(drawn.bars) == 8 and drawn.per == "rank"
    heights = [sum(piece.height for piece in bar.pieces) for bar in drawn.bars]
    assert heights[7] / heights[0] == pytest.approx(207 / 200, rel=0.01)
    shares = [piece.height / heights[0] for piece in drawn.bars[0].pieces]
    assert shares == pytest.approx([30 / 200, 60 / 200, 110 / 200], rel=0.02)
    assert drawn.bars[2].tip == ("rank 2\npeak: 202 MiB\nparameters: 31 MiB\noptimizer state: 60 MiB\nthe rest: 111 MiB")
    assert drawn.limit is not None and drawn.limit < min(bar.pieces[-1].y for bar in drawn.bars)
    assert [tick.label for tick in drawn.ticks] == ["0 MiB", "100 MiB", "200 MiB", "300 MiB", "400 MiB"]
    assert drawn.words == ("the highest peak is 207 MiB, 51.7 % of the limit of 400 MiB per rank, "
                           "model state takes at most 91 MiB of it")


def test_what_is_kept_for_backwards_is_a_part_of_its_own(run: Run) -> None:
    run.trace()
    facts = read_facts(run.run)
    traces = {rank: replace(trace, memory=replace(trace.memory, activations=40 * 2**20, away=80 * 2**20))
              for rank, trace in facts.traces.items() if trace.memory is not None}
    assert facts.spec is not None
    parallel = facts.spec.parallel.model_copy(update={"recompute": "full", "offload": ("activations",), "offload_horizon": 1})
    spec = facts.spec.model_copy(update={"parallel": parallel})
    drawn = memory(traces, run.placement, spec, (ChunkCounts(4, 2, 3), ChunkCounts(1, 1, 0)))
    assert drawn is not None and ("activations", "activations kept for backwards") in drawn.legend
    assert drawn.bars[2].tip == ("rank 2\npeak: 202 MiB\nparameters: 31 MiB\noptimizer state: 60 MiB\n"
                                 "activations kept for backwards: 40 MiB\nthe rest: 71 MiB\nactivations on the host: 80 MiB")
    assert drawn.words.endswith(
        "recompute is full, and a rank has at most 4 microbatches between forward and backward: at most 2 with activations on "
        "the device and 3 on the host (offload with a horizon of 1)")


@pytest.mark.parametrize(("limit", "words"), [(10**12, "of the limit of 931 GiB"), (0, "limit unknown")])
def test_a_limit_out_of_sight_is_said(run: Run, limit: int, words: str) -> None:
    run.trace(limit=limit)
    drawn = memory(read_facts(run.run).traces, run.placement)
    assert drawn is not None and drawn.limit is None and words in drawn.words


def test_many_ranks_are_grouped_by_stage(tmp_path: Path) -> None:
    run = Run(tmp_path, nodes=16, per_node=8, tensor=4, pipeline=4).complete()
    drawn = memory(read_facts(run.run).traces, run.placement)
    assert drawn is not None
    assert [bar.label for bar in drawn.bars] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert drawn.bars[3].tip.startswith("stage 3: rank 127, the highest peak of 32\nthe lowest: rank 12, peak 212 MiB")
