"""The page of a plan: whether a job fits, how fast it is and why, and the layouts that it was compared with."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import tomli_w

from hpc_mp.base.text import counted, duration, memory_size, number, percent, runs
from hpc_mp.layout.flat import stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.placement import Placement, place
from hpc_mp.layout.schedule.names import is_table
from hpc_mp.layout.schedule.simulate import Times, simulate
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.footprint import Footprint
from hpc_mp.planner.question import Question
from hpc_mp.planner.search import Plan
from hpc_mp.planner.step import StepTime, step_time
from hpc_mp.report import gantt, summary
from hpc_mp.report.axes import Scale, ticks
from hpc_mp.report.grid import grid
from hpc_mp.report.html import HERE, filled, publish
from hpc_mp.rundir.records import RankTrace

COMPUTATION, MESSAGES, WAITING = "forward", "reduce", "rest"
CAUSES = {  # part of a step: (CSS class, words)
    "products": (COMPUTATION, "matrix products"), "attention": (COMPUTATION, "attention"),
    "passes": (COMPUTATION, "element-wise passes"), "head": (COMPUTATION, "head and loss"),
    "recompute": ("weight", "recomputation"), "update": ("optimizer", "optimizer"),
    "tensor": (MESSAGES, "tensor axis: collectives"), "context": (MESSAGES, "context axis: ring"),
    "experts": (MESSAGES, "experts: all-to-all"), "gathers": (MESSAGES, "ZeRO: gathers and scatters"),
    "reduce": (MESSAGES, "data axis: sums of gradients"), "publish": (MESSAGES, "data axis: new parameters"),
    "messages": (MESSAGES, "pipeline: messages"), "bubble": (WAITING, "pipeline bubble"),
    "skew": (WAITING, "wait for slower ranks"), "host": (WAITING, "host: launches of kernels")}
CAUSE_LEGEND = ((COMPUTATION, "computation"), ("weight", "recomputation"), ("optimizer", "optimizer"), (MESSAGES, "messages"),
                (WAITING, "waiting"))
HELD = {  # line of a footprint: (CSS class, words)
    **{line: (line, line) for line in ("parameters", "gradients", "activations")},
    "optimizer": ("optimizer", "optimizer state"),
    "logits": ("weight", "logits"), "gathered": ("clip", "gathered parameters"), "working": ("send", "working memory"),
    "messages": ("other", "messages"), "libraries": ("rest", "libraries and gaps (an estimate)")}
HEIGHT = 240  # pixels of the frontier
MOST_NODES = 64
LEAST = 1e-6  # share of a step that is shown
DRAWN = 16  # microbatches of a schedule, or two for each pipeline rank if that is more


def write_plan_page(question: Question, plan: Plan, page: Path, now: float) -> Path:
    """Write the page of a plan as of ``now`` (unix seconds). Raises HpcMpError if it cannot be written."""
    return publish(page, render(question, plan, now), option="--html")


def render(question: Question, plan: Plan, now: float) -> str:
    """Return the page of the best plan. All text from the job and the catalogue is escaped."""
    layout, machine, gpu, pipeline = plan.layout, question.machine, question.machine.gpu, plan.layout.degrees.pipeline
    drawn = layout.microbatches if is_table(layout.schedule) else min(layout.microbatches, max(DRAWN, 2 * pipeline))
    shown = plan.job.model_copy(update={"parallel": plan.job.parallel.model_copy(update={"microbatches": drawn})})
    placement = place(layout.degrees, layout.order.replace("auto", "DPT"), layout.ranks_per_node, layout.rank_map)
    ranks, peak = grid(placement, {}), max(plan.footprints, key=lambda rank: rank.total)
    tflops = gpu.peak_tflops.get(layout.precision) or gpu.peak_tflops["fp16"]
    ranks.nodes, hidden = ranks.nodes[:MOST_NODES], len(ranks.nodes[MOST_NODES:])
    return filled(
        HERE / "plan.html.j2", now,
        verb="plan", name=plan.job.job.name,
        plan=plan, at=layout, peak=peak, fits=peak.total <= machine.memory, shape=question.shape, memory=machine.memory,
        machine=f"{counted(layout.nodes, 'node')} × {layout.ranks_per_node} {gpu.title or gpu.name} · {machine.fabric.title}",
        layout=summary.layout(placement, plan.job),
        tokens=layout.degrees.data * layout.microbatches * layout.samples * layout.sequence,
        tflops=tflops, gflops=plan.step.mfu * layout.ranks * tflops * 1e3 / plan.step.tokens_per_s,
        held=_held(plan, machine.memory), fullest=[(words, size) for _, words, size in _lines(peak) if size],
        causes=_causes(plan.step), causes_legend=CAUSE_LEGEND,
        gantt=gantt.gantt(_traces(question, layout, drawn, placement), placement, shown) if pipeline > 1 else None,
        drawn=drawn, bubble=plan.step.parts.get("bubble", 0.0) / plan.step.seconds, size=gantt,
        grid=ranks, hidden=hidden, frontier=_frontier(question, plan),
        toml=tomli_w.dumps({"parallel": plan.job.parallel.model_dump(mode="json", exclude_none=True, exclude_unset=True)}),
        digest=lambda script: base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        counted=counted, memory_size=memory_size, duration=duration, number=number, thousands="{:,}".format,
    )


def _bar(label: str, note: str, parts: Sequence[tuple[str, str, float]], whole: float, *texts: str) -> SimpleNamespace:
    """Return a row: pieces of CSS class, hover text and size, in percent of ``whole``, and the texts behind them."""
    pieces = [SimpleNamespace(kind=kind, tip=tip, width=round(100 * size / whole, 3)) for kind, tip, size in parts if size > 0]
    return SimpleNamespace(label=label, note=note, pieces=pieces, texts=texts)


def _lines(rank: Footprint) -> list[tuple[str, str, int]]:
    """Return CSS class, words and bytes of the lines of device memory."""
    lines = [line.name for line in fields(rank) if line.name != "host"]
    return [(*HELD.get(line, ("other", line)), getattr(rank, line)) for line in lines]


def _held(plan: Plan, memory: int) -> SimpleNamespace:
    """Return a bar for each pipeline rank, the place of the GPU's memory in percent, and a table of all lines in bytes."""
    whole, rows = 1.02 * max(memory, *(rank.total for rank in plan.footprints)), []
    stages = list(zip(stage_spans(plan.layout.layers), schedule_of(plan.layout).placement, strict=True))
    for pipeline, rank in enumerate(plan.footprints):
        spans = runs(sorted(layer for span, holder in stages if holder == pipeline for layer in span.layers))
        layers = ", ".join(f"{first}–{last}" if first < last else f"{first}" for first, last in spans)
        parts = [(kind, f"{words}: {memory_size(size)}", size) for kind, words, size in _lines(rank)]
        rows.append(_bar(f"rank {pipeline}", f"layers {layers}", parts, whole, memory_size(rank.total),
                         percent(rank.total / memory)))
    x, lines = Scale(0, whole / 2**30, 0, 100), list(zip(*map(_lines, plan.footprints), strict=True))
    table = [(*line[0][:2], [size for *_, size in line]) for line in lines if any(size for *_, size in line)]
    return SimpleNamespace(rows=rows, limit=x(memory / 2**30), ticks=ticks(x, 6), memory=memory_size(memory), table=table,
                           legend=[line[:2] for line in table], host=[rank.host for rank in plan.footprints])


def _causes(step: StepTime) -> list[SimpleNamespace]:
    """Return a bar for each part of a step, the longest first."""
    longest, ranked = max(step.parts.values()), sorted(step.parts.items(), key=lambda part: -part[1])
    rows = [(*CAUSES.get(name, ("other", name)), took) for name, took in ranked if took > LEAST * step.seconds]
    return [_bar(words, "", [(kind, duration(took), took)], longest, duration(took), percent(took / step.seconds))
            for kind, words, took in rows]


def _traces(question: Question, layout: Layout, microbatches: int, placement: Placement) -> dict[int, RankTrace]:
    """Return the simulated computations of the first pipeline's ranks, with that many microbatches."""
    timelines = []

    def simulated(layout: Layout, forwards: list[float], backwards: list[float], latency: float) -> float:
        halves = dict(enumerate(seconds / 2 for seconds in backwards))
        times: Times = {"F": dict(enumerate(forwards)), "B": dict(enumerate(backwards)), "I": halves, "W": halves}
        timelines.append(simulate(schedule_of(replace(layout, microbatches=microbatches)), times, latency))
        return timelines[0].makespan

    step_time(layout, question.shape, question.machine, question.framework, simulated)
    lines = gantt.simulated(timelines[0])
    return {at.rank: RankTrace(1, at.rank, 1, lines[at.pp].spans, pp=at.pp)
            for at in placement.ranks if at.dp == at.cp == at.tp == 0}


def _frontier(question: Question, best: Plan) -> SimpleNamespace:
    """Return tokens per second over memory, in pixels and percent: a row for each plan, the best first, a dot for each other
    one that was tried, and the corners of the frontier: plans that no other one beats in both."""
    memory, named = question.machine.memory, (best, *best.others)
    plans = (*named, *(plan for plan in best.tried if all(plan.layout != other.layout for other in named)))
    peaks = [max((rank.total for rank in plan.footprints), default=plan.needs) for plan in plans]
    points = [(peak / 2**30, plan.step.tokens_per_s) for peak, plan in zip(peaks, plans, strict=True)]
    slowest, fastest = min(speed for _, speed in points), max(speed for _, speed in points)
    margin = 0.1 * (fastest - slowest) or 0.1 * fastest
    x = Scale(0, 1.02 * max(memory / 2**30, *(size for size, _ in points)), 0, 100)
    y = Scale(slowest - margin, fastest + margin, HEIGHT, 0)
    front = [point for point in sorted(set(points)) if all(size > point[0] or speed <= point[1] for size, speed in points)]
    rows = [SimpleNamespace(x=x(size), y=y(speed), step=plan.step, peak=peak, layout=_words(plan.layout), fits=peak <= memory,
                            about="" if plan.footprints else "about ",
                            behind=_behind(best.step, plan.step, peak - peaks[0]) if plan is not best else "the best")
            for plan, peak, (size, speed) in zip(plans, peaks, points, strict=True)]
    corners = list(pairwise((x(size), y(speed)) for size, speed in front))
    return SimpleNamespace(rows=rows[:len(named)], dots=rows[len(named):], corners=corners, x_ticks=ticks(x, 6),
                           y_ticks=ticks(y, 5), limit=x(memory / 2**30), height=HEIGHT)


def _words(layout: Layout) -> str:
    degrees = layout.degrees
    axes = (("tensor", degrees.tensor), ("pipeline", degrees.pipeline), ("context", degrees.context), ("data", degrees.data))
    sizes = " × ".join(f"{name} {degree}" for name, degree in axes if degree > 1) or "one rank"
    experts = f", expert {degrees.expert}" if degrees.expert > 1 else ""
    stages = f" × {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    batches = f"{counted(layout.microbatches, 'microbatch', 'microbatches')} of {layout.samples}"
    apart = " · sequence parallel" if layout.sequence_parallel else ""
    return (f"{sizes}{experts} · ZeRO-{layout.zero} · {layout.schedule}{stages}, {batches} · recompute {layout.recompute}"
            f"{apart} · order {layout.order}")


def _behind(best: StepTime, other: StepTime, more: float) -> str:
    """Return how much slower than the best another plan is, the part that makes most of it, and how many bytes larger it is."""
    later, faster = other.seconds - best.seconds, other.seconds < best.seconds
    space = f"{memory_size(abs(more))} {'more' if more >= 0 else 'less'}"
    if f"{other.seconds:.3e}" == f"{best.seconds:.3e}":
        return f"as fast; {space}"
    grown = {part: other.parts.get(part, 0.0) - best.parts.get(part, 0.0) for part in best.parts | other.parts}
    part = max(grown, key=lambda part: -grown[part] if faster else grown[part])
    cause = f"{CAUSES.get(part, ('', part))[1]} ({'+' if grown[part] >= 0 else '−'}{duration(abs(grown[part]))})"
    return (f"{duration(abs(later))} {'faster' if faster else 'slower'} ({percent(abs(later) / best.seconds)}), most of it: "
            f"{cause}; {space}")
