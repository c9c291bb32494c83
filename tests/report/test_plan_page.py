"""The page of a plan: its structure, its figures against the plan's own, hostile text, and a browser's view."""

import base64
import hashlib
import json
import re
import tomllib
from dataclasses import fields, replace
from functools import cache
from html import unescape
from pathlib import Path

import pytest
from browser import needs_browser, opened
from click.testing import CliRunner
from html_page import Page

from hpc_mp.base.text import duration, memory_size, number, percent
from hpc_mp.cli.main import cli
from hpc_mp.job import resolve
from hpc_mp.job.layout import read_shape, stage_cut, undivided
from hpc_mp.job.resolution import ResolvedKey, resolved
from hpc_mp.planner.footprint import Footprint, footprint
from hpc_mp.planner.machine import machine_named
from hpc_mp.planner.question import Question
from hpc_mp.planner.search import Plan
from hpc_mp.planner.step import step_time
from hpc_mp.report.plan_page import CAUSES, HELD, MOST_NODES, render, write_plan_page

NOW = 1_790_000_000.0
HOSTILE = "<script>alert(1)</script>\"'&"
ENDS = ("reduce", "publish", "update", "skew")  # of a step without virtual stages, besides its pipeline
LEAST = 1e-6  # of a step of a tenth of a second: rounding
OUTSIDE = re.compile(r"https?:|//\w|\bsrc=|\bhref=|@import|url\((?!#)")


def question(nodes: int = 2, batch: int = 64) -> Question:
    spec = resolve({
        "job": {"name": "demo", "nodes": nodes, "ranks_per_node": 8},
        "model": {"config": {"model_type": "gpt2", "n_layer": 8, "n_embd": 2048, "n_head": 16}},
        "data": {"files": ["*.txt"], "sequence_length": 1024},
        "parallel": {"tensor": 2},
        "train": {"steps": 10, "global_batch": batch, "precision": "bf16"},
    }, Path("/"))
    return Question(spec, read_shape(spec), machine_named("p5"), frozenset({"tensor"}))


def planned(asked: Question, pipeline: int, microbatches: int, **keys: object) -> Plan:
    values = {"pipeline": pipeline, "microbatches": microbatches, "order": "DPT"} | keys
    job = resolved(asked.spec, [ResolvedKey(f"parallel.{key}", value) for key, value in values.items()])
    layout = replace(undivided(job), layers=stage_cut(job, asked.shape).layers)
    return Plan(job, layout, step_time(layout, asked.shape, asked.machine), 0.0, footprint(layout, asked.shape))


@cache
def plan() -> Plan:
    small = replace(planned(question(), 2, 4, recompute="full"), footprints=(), needs=30.5 * 2**30)
    others = small, planned(question(), 8, 16, zero=0)
    return replace(planned(question(), 4, 8), others=others, lost={"does not fit": 1234, "slower": 0})


def rendered(asked: Question, best: Plan) -> Page:
    return Page(render(asked, best, NOW))


def peak(one: Plan) -> Footprint:
    return max(footprint(one.layout, question().shape), key=lambda rank: rank.total)


def widths(page: Page) -> list[tuple[str, float]]:
    """Class and percent of all pieces of bars, in order."""
    pieces = [piece for piece in page.all("i") if (piece.get("style") or "").startswith("width:")]
    return [(piece["class"] or "", float((piece["style"] or "").removeprefix("width:").rstrip("%"))) for piece in pieces]


@pytest.fixture(scope="module")
def page() -> Page:
    return rendered(question(), plan())


def test_sections_tables_and_texts_for_those_who_do_not_see(page: Page) -> None:
    assert [section["id"] for section in page.all("section")] == [
        "memory", "step", "pipeline", "ranks", "frontier", "layout", "arithmetic"]
    drawn = [*page.all("svg", role="img"), *page.all("span", role="img")]
    assert len(drawn) == 2 + 4 + len([took for took in plan().step.parts.values() if took > LEAST]) and all(
        figure["aria-label"] for figure in drawn)
    assert [table.get("aria-label") for table in page.all("table")] == [
        "Bytes at the peak of a step", None, "Seconds of a step by causes", "Layouts", None]
    assert len(page.all("div", class_="cell")) == 16
    assert len(page.all("div", class_="node")) == 2


def test_the_policy_knows_the_only_script(page: Page) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", page.source, re.DOTALL)
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv"))
    assert policy is not None and "default-src 'none'" in policy
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "clipboard" in script and "data-tip" in script


def test_the_figures_are_the_plans(page: Page) -> None:
    best, memory = plan(), question().machine.memory
    assert "fits gpt2, 8 layers of 2,048" in page.text
    for text in (f"needs {memory_size(peak(best).total)} of its GPU's {memory_size(memory)}", duration(best.step.seconds),
                 number(best.step.tokens_per_s), percent(best.step.mfu), "Other candidates: does not fit: 1,234.",
                 f"= {peak(best).total:,}", f"64 × 1,024 = {64 * 1024:,}", "tensor 2 × pipeline 4 × context 1 × data 2 = 16"):
        assert text in page.text, text
    drawn, whole = widths(page), 1.02 * memory
    for rank in best.footprints:
        lines = [line.name for line in fields(rank) if line.name != "host" and getattr(rank, line.name)]
        mine, drawn = drawn[:len(lines)], drawn[len(lines):]
        assert [kind for kind, _ in mine] == [HELD[line][0] for line in lines]
        assert [share for _, share in mine] == pytest.approx([100 * getattr(rank, line) / whole for line in lines], abs=1e-3)
        assert sum(share for _, share in mine) == pytest.approx(100 * rank.total / whole, abs=0.01)
    parts = sorted(((took, name) for name, took in best.step.parts.items() if took > LEAST), reverse=True)
    assert [kind for kind, _ in drawn] == [CAUSES[name][0] for _, name in parts]
    assert [share for _, share in drawn] == pytest.approx([100 * took / parts[0][0] for took, _ in parts], abs=1e-3)
    assert all(f"{CAUSES[name][1]} {duration(took)} {percent(took / best.step.seconds)}" in page.text for took, name in parts)


def test_the_operations_of_a_token_are_those_of_the_model(page: Page) -> None:
    """Twelve h² weights in each of GPT-2's layers, the head, and the attention."""
    h, layers, vocabulary, length = 2048, 8, 50257, 1024
    flops = 6 * (layers * 12 * h * h + vocabulary * h) + 12 * layers * h * length
    assert f"× {number(flops / 1e9)} GFLOP per token / (16 GPUs × 989" in page.text


def test_every_line_and_part_has_words() -> None:
    best = plan()
    assert {line.name for line in fields(peak(best))} - {"host"} == HELD.keys()
    every = (best, planned(question(), 1, 4, context=2, zero=3), planned(question(), 2, 4, recompute="full"),
             planned(question(), 2, 4, schedule="interleaved_1f1b", virtual_stages=2))
    assert {part for one in every for part in one.step.parts} | {"host"} <= CAUSES.keys()


def test_the_schedule_is_the_steps_own(page: Page) -> None:
    """All microbatches are drawn: the chart lasts as long as the step without its end, after the pipeline."""
    best = plan()
    pipeline = best.step.seconds - sum(best.step.parts.get(part, 0.0) for part in ENDS)
    assert f"simulated: {duration(pipeline)} from the first forward" in page.text
    boxes = [box for kind in ("forward", "backward") for box in page.all("rect", class_=kind)]
    assert len(boxes) == 4 * 2 * 8
    shown = rendered(question(batch=256), planned(question(batch=256), 2, 64))
    assert "with 16 of the 64 microbatches" in shown.text
    assert len([box for kind in ("forward", "backward") for box in shown.all("rect", class_=kind)]) == 2 * 2 * 16


def test_the_frontier_has_every_layout_and_marks_the_best(page: Page) -> None:
    plans = (plan(), *plan().others)
    circles = [circle for circle in page.all("circle") if (circle["cx"] or "").endswith("%")][::-1]
    assert [circle.get("class") for circle in circles] == ["best", None, None]
    sizes = [peak(plans[0]).total, plans[1].needs, peak(plans[2]).total]
    assert [float((circle["cx"] or "").rstrip("%")) for circle in circles] == pytest.approx(
        [100 * size / (1.02 * question().machine.memory) for size in sizes], abs=0.06)
    assert f"about {memory_size(plans[1].needs)}" in page.text, "its footprint is not known"
    by_speed = sorted(range(3), key=lambda i: -plans[i].step.tokens_per_s)
    assert sorted(range(3), key=lambda i: float(circles[i]["cy"] or "")) == by_speed
    for other in plans[1:]:
        later = other.step.seconds - plans[0].step.seconds
        share = percent(abs(later) / plans[0].step.seconds)
        assert f"{duration(abs(later))} {'slower' if later > 0 else 'faster'} ({share})" in page.text


def test_all_that_was_tried_is_a_dot_once() -> None:
    more = planned(question(), 2, 8)
    page = rendered(question(), replace(plan(), tried=(*plan().others, more, plan())))
    circles = [circle for circle in page.all("circle") if (circle["cx"] or "").endswith("%")]
    assert len(circles) == 4 and "1 other candidate," in page.text
    over = 100 * peak(more).total / (1.02 * question().machine.memory)
    assert float((circles[0]["cx"] or "").rstrip("%")) == pytest.approx(over, abs=0.06)


def test_equal_speed_is_no_delay() -> None:
    again = rendered(question(), replace(plan(), others=(plan(),)))
    assert "as fast; 0 B more" in again.text and "slower" not in again.text.split("against the best")[1].split("Other")[0]


def test_the_layout_can_be_copied_and_is_a_job_again(page: Page) -> None:
    (text,) = re.findall(r'<pre id="toml"[^>]*>(.*?)</pre>', page.source, re.DOTALL)
    table = tomllib.loads(unescape(text))["parallel"]
    assert table == {"tensor": 2, "pipeline": 4, "microbatches": 8, "order": "DPT"}
    assert page.all("button", data_copies="toml") and "zero" not in table, "what the job leaves to its defaults is left out"


def test_too_large_a_job_and_one_without_a_pipeline() -> None:
    asked = question(nodes=1, batch=8 * 512)
    large = planned(asked, 1, 1)
    text = rendered(asked, large).text
    over = peak(large).total - asked.machine.memory
    assert over > 0 and "does not fit" in text and f"{memory_size(over)} too much" in text and "No pipeline" in text
    assert "Other candidates" not in text


def test_nodes_beyond_the_first_are_counted() -> None:
    asked = question(nodes=80, batch=640)
    page = rendered(asked, planned(asked, 4, 2))
    assert len(page.all("div", class_="node")) == MOST_NODES and "16 more nodes are not shown" in page.text


def test_hostile_text_is_text() -> None:
    asked = question()
    job = plan().job.model_copy(update={"job": plan().job.job.model_copy(update={"name": HOSTILE})})
    machine = replace(asked.machine, fabric=replace(asked.machine.fabric, title=HOSTILE))
    page = rendered(replace(asked, machine=machine), replace(plan(), job=job, lost={HOSTILE: 1}))
    assert page.text.count(HOSTILE) >= 3 and len(page.all("script")) == 1
    assert len(Page(f"<p>{HOSTILE}</p><script></script>").all("script")) == 2, "unescaped text would be seen"


def test_nothing_comes_from_outside(page: Page) -> None:
    assert not OUTSIDE.search(page.source)
    assert OUTSIDE.search(page.source.replace("<header>", '<header><img src="x">'))


@pytest.mark.parametrize(("tensor", "state"), [(8, "fits"), (1, "does not fit")])
def test_the_verb_writes_the_page_of_what_fits_and_of_what_does_not(tmp_path: Path, tensor: int, state: str) -> None:
    """A layer has 0.8 billion weights: eight with their state do not fit on one GPU. The error is that of a call without page."""
    config, file = tmp_path / "config.json", tmp_path / "plan.html"
    config.write_text(json.dumps({"model_type": "llama", "hidden_size": 8192, "intermediate_size": 24576, "num_hidden_layers": 8,
                                  "num_attention_heads": 64, "vocab_size": 32000}), encoding="utf-8")
    keys = {"tensor": tensor, "pipeline": 1, "zero": 0, "microbatches": 8, "recompute": '"full"'}
    words = ["plan", "--model", str(config), "--cluster", "p5:1", "--sequence", "1024", "--global-batch", "64",
             *(word for key, value in keys.items() for word in ("--set", f"parallel.{key}={value}"))]
    done, plain = (CliRunner().invoke(cli, [*words, *more]) for more in (["--html", str(file)], []))
    assert (done.exit_code, done.output, str(done.exception)) == (plain.exit_code, plain.output, str(plain.exception))
    assert (done.exit_code == 0) == (state == "fits")
    assert f"job {state} llama" in Page(file.read_text(encoding="utf-8")).text


@pytest.mark.prove
@needs_browser
@pytest.mark.parametrize("width", [1400, 400])
def test_a_browser_draws_it_and_nothing_sticks_out(tmp_path: Path, width: int) -> None:
    file = write_plan_page(question(), plan(), tmp_path / "plan.html", NOW)
    view = opened(file, width)
    assert view.complaints == () and not view.overflows
    assert all(wide > 100 and high > 20 for _, wide, high in view.figures) and len(view.figures) >= 3
    assert "Copy" in view.text, "its script ran"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("button.hidden = false", "button.hidden  = false"), encoding="utf-8")
    spoilt = opened(file, width)
    assert spoilt.complaints and "Copy" not in spoilt.text
