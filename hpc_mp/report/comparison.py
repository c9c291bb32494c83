"""A comparison of several runs on one page: overlaid curves, the differences of their job files, and their results."""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, median_low
from types import SimpleNamespace
from typing import Any

from hpc_mp.base.text import counted, duration, loss_number, memory_size, number
from hpc_mp.job import AnySpec
from hpc_mp.job.sweep import words_of
from hpc_mp.job.values import leaves, toml_value
from hpc_mp.report import curves
from hpc_mp.report.axes import Scale, ticks
from hpc_mp.report.curves import AS_SAID, BOTTOM, HEIGHT, HUGE, LEFT, MOST_POINTS, RIGHT, SCALE_OVER_MEDIAN, TOP, WIDTH, thinned
from hpc_mp.report.facts import RunFacts, read_facts
from hpc_mp.report.html import HERE, filled, publish
from hpc_mp.report.page import HIDDEN
from hpc_mp.report.summary import later_half, layout, lifetime, name, summarize
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.records import losses
from hpc_mp.rundir.retention import best_evaluation
from hpc_mp.rundir.runs import best_of

FLATTEST = 5  # the flattest run's curve has at least a fifth of the height
THROUGHPUT = "Throughput"
POINTS = 6_000  # in a figure with many runs: a browser draws them at once, and the page has a few hundred kB
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class OverlayPanel:
    """One figure: its heading, its quantity, and its axes. ``points``: points of a run, over its steps or over the unit named by
    ``along``. ``low``: True if the y axis begins at 0 instead of the lowest value. ``dots``: True if the points are few and
    marked individually."""

    title: str
    subtitle: str
    points: Callable[[RunFacts], Points]
    along: str = "step"
    low: bool = False
    dots: bool = False


PANELS = (
    OverlayPanel("Loss", "mean over all tokens of the global batch",
                 lambda run: [(metric.step, metric.loss) for metric in run.metrics]),
    OverlayPanel("Held-out loss", "on evaluate.files",
                 lambda run: [(evaluation.step, evaluation.loss) for evaluation in run.evaluations], dots=True),
    OverlayPanel(THROUGHPUT, "tokens per second, all ranks together",
                 lambda run: [(metric.step, metric.tokens_per_s) for metric in run.metrics], low=True),
    OverlayPanel("Learning rate", "after warm-up and schedule",
                 lambda run: [(metric.step, metric.learning_rate) for metric in run.metrics], low=True),
)
BY_TOKENS = OverlayPanel("Loss by tokens", "because the runs' steps differ in size",
                         lambda run: [(metric.tokens, metric.loss) for metric in run.metrics], along="token")


def overlays(runs: Sequence[RunFacts], labels: Sequence[str]) -> tuple[SimpleNamespace, ...]:
    """Return the figures with at least one point, including the loss by tokens if the runs' steps differ in size."""
    sizes = {run.metrics[-1].tokens // run.metrics[-1].step for run in runs if run.metrics and run.metrics[-1].step}
    panels: tuple[OverlayPanel, ...] = (PANELS[0], BY_TOKENS, *PANELS[1:]) if len(sizes) > 1 else PANELS
    if all(run.program is not None for run in runs):
        panels = tuple(panel if panel.title == THROUGHPUT else replace(panel, subtitle=AS_SAID) for panel in panels)
    return tuple(figure for panel in panels if (figure := overlay(panel, runs, labels)) is not None)


def overlay(panel: OverlayPanel, runs: Sequence[RunFacts], labels: Sequence[str]) -> SimpleNamespace | None:
    """Return one figure in pixels, with notes on points that could not be drawn; None if no run has a finite value, or if
    programs reported no value: their values are then 0."""
    every = [panel.points(run) for run in runs]
    finite = [[(at, value) for at, value in points if abs(value) < HUGE] for points in every]
    if not any(value for points in finite for _, value in points):
        return None
    low, high = _range(panel, [[value for _, value in points] for points in finite if points])
    ends = [at for points in finite for at, _ in points]
    x, y = Scale(min(ends), max(ends), LEFT, WIDTH - RIGHT), Scale(low, high, HEIGHT - BOTTOM, TOP)
    limit = max(100, min(MOST_POINTS, POINTS // len(runs)))
    notes = []
    for label, points, drawn in zip(labels, every, finite, strict=True):
        if len(drawn) < len(points):
            notes.append(f"{label}: {counted(len(points) - len(drawn), 'value')} not finite")
        if above := sum(value > high for _, value in drawn):
            notes.append(f"{label}: {counted(above, 'value')} above the scale")
    return SimpleNamespace(
        panel=panel,
        lines=tuple(_line(number, thinned(points, limit), x, y, high) for number, points in enumerate(finite) if points),
        x_ticks=ticks(x, 6, whole=True),
        y_ticks=ticks(y, 6),
        notes=tuple(notes),
    )


def _line(number: int, points: Points, x: Scale, y: Scale, high: float) -> SimpleNamespace:
    """Return a run's curve: ``at``, ``values`` and ``pixels`` correspond one to one; ``run`` is its number on the page."""
    return SimpleNamespace(run=number, at=tuple(at for at, _ in points), values=tuple(value for _, value in points),
                           pixels=tuple((x(at), y(min(value, high))) for at, value in points))


def _range(panel: OverlayPanel, runs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the ends of the y axis. A run whose loss diverges, or steps that warm up, must not flatten the other curves."""
    every = [value for run in runs for value in run]
    if panel.low:
        usual = SCALE_OVER_MEDIAN * max(median(run) for run in runs)
        return 0.0, 1.08 * min(max(every), usual) if usual > 0 else max(every)
    low, usual = min(every), median_low(max(run) for run in runs)
    high = min(max(every), low + FLATTEST * (usual - low)) if usual > low else max(every)
    margin = 0.05 * (high - low)
    return low - margin, high + margin


COLOURS = 7  # of page.css; further lines repeat the colours, dashed
DASHES = 4
NONE = "–"
LOSS, BEST = "Loss, first and last", "Best on held-out text"
SECRET = ("environment.set.", "program.environment.")


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A row of a table: its subject, and a text for each run. ``marked``: the run with the best value; None without one."""

    what: str
    cells: tuple[str, ...]
    marked: int | None = None


def write_comparison(runs: Sequence[RunDirectory], page: Path | None = None) -> Path:
    """Write ``comparison.html`` into the first run, or another ``page``. Raises HpcMpError if the page cannot be written."""
    return publish(page or runs[0].comparison, render_comparison([read_facts(run) for run in runs], time.time()))


def render_comparison(runs: Sequence[RunFacts], now: float) -> str:
    """Return the page as of ``now`` (unix seconds). All text from the runs is escaped."""
    labels = labels_of(runs)
    states = [summarize(run) for run in runs]
    return filled(
        HERE / "comparison.html.j2", now,
        title=f"{labels[0]} and {counted(len(runs) - 1, 'other')}" if len(runs) > 2 else " and ".join(labels),
        runs=[{"label": label, "path": str(run.path.resolve()), "state": state.state, "cause": state.cause,
               "swept": words_of(run.sweep.values) if run.sweep else "",
               "colour": index % COLOURS, "dashes": index // COLOURS % DASHES}
              for index, (label, run, state) in enumerate(zip(labels, runs, states, strict=True))],
        overlays=overlays(runs, labels),
        ends=ends(runs),
        differences=differences([run.spec or run.program for run in runs],
                                {key for run in runs if run.sweep for key in run.sweep.values}),
        notes=notes(runs, labels),
        size=curves,
    )


def labels_of(runs: Sequence[RunFacts]) -> tuple[str, ...]:
    """Return labels such as ``demo 0001``; if two runs share a label, return the distinct part of their paths."""
    names = [name(run.path, run.spec) for run in runs]
    if len(set(names)) == len(names):
        return tuple(names)
    paths = [run.path.resolve() for run in runs]
    common = os.path.commonpath(paths)
    return tuple(str(path.relative_to(common)) for path in paths)


def differences(specs: Sequence[AnySpec | None], swept: Collection[str] = ()) -> tuple[ComparedRow, ...]:
    """Return the keys of the resolved job files that differ. Variables may be passwords: their values are left out, unless a
    sweep has ``swept`` over them. An invalid job file has no keys and does not count."""
    tables: list[Mapping[str, Any] | None] = [None if spec is None else leaves("", spec.model_dump()) for spec in specs]
    present = [table for table in tables if table is not None]
    keys = dict.fromkeys(key for table in present for key in table)
    return tuple(ComparedRow(key, tuple(NONE if table is None else _value(key, table, key in swept) for table in tables))
                 for key in keys if any(table.get(key) != present[0].get(key) for table in present))


def _value(key: str, job: Mapping[str, Any], swept: bool) -> str:
    value = job.get(key)
    return NONE if value is None else HIDDEN if key.startswith(SECRET) and not swept else toml_value(value)


def ends(runs: Sequence[RunFacts]) -> tuple[ComparedRow, ...]:
    """Return every run's progress, cost and result; rows without a value are left out."""
    best = {index: evaluation for index, run in enumerate(runs) if (evaluation := best_evaluation(run.evaluations))}
    comparable = len(best) > 1 and _same_text(runs) and len({evaluation.criterion for evaluation in best.values()}) == 1
    marks = {LOSS: _best_by_loss(runs), BEST: min(best, key=lambda index: best[index].cost) if comparable else None}
    rows = [ComparedRow(what, tuple(text(run) or NONE for run in runs), marks.get(what)) for what, text in ENDS]
    return tuple(row for row in rows if any(cell != NONE for cell in row.cells))


def _best_by_loss(runs: Sequence[RunFacts]) -> int | None:
    """Return the best run of a sweep without held-out losses. Unrelated runs may have losses on different texts."""
    if len({(run.path.resolve().parent, run.sweep.first) if run.sweep else run.path for run in runs}) > 1:
        return None
    series = [losses(run.metrics) for run in runs]
    best = best_of((values[-1] if values else None, best_evaluation(run.evaluations))
                   for values, run in zip(series, runs, strict=True))
    return best[0] if best is not None and best[1] == "loss" else None


def _same_text(runs: Sequence[RunFacts]) -> bool:
    """Return True if the newest evaluations of all runs have the same number of tokens: else they are not comparable."""
    return len({run.evaluations[-1].label_tokens for run in runs if run.evaluations}) <= 1


def notes(runs: Sequence[RunFacts], labels: Sequence[str]) -> tuple[str, ...]:
    """Return caveats for the comparison."""
    caveats = [f"{label}: {problem}" for run, label in zip(runs, labels, strict=True) for problem in run.problems]
    if not _same_text(runs):
        counts = ", ".join(f"{label} {run.evaluations[-1].label_tokens:,}" for run, label in zip(runs, labels, strict=True)
                           if run.evaluations)
        caveats.append(f"the held-out texts differ, so no best loss is marked; counted tokens: {counts}")
    return tuple(caveats)


def _steps(run: RunFacts) -> str:
    done = run.metrics[-1].step if run.metrics else 0
    return f"{done:,} of {run.spec.train.steps:,}" if run.spec else f"{done:,}"


def _loss(run: RunFacts) -> str:
    values = losses(run.metrics)
    return f"{loss_number(values[0])} → {loss_number(values[-1])}" if values else ""


def _wall_clock(run: RunFacts) -> str:
    span = lifetime(run, summarize(run).state)
    return duration(span[1] - span[0]) if span else ""


def _speed(run: RunFacts) -> str:
    speed = median(metric.tokens_per_s for metric in later_half(run.metrics)) if run.metrics else 0.0
    return number(speed) if speed else ""  # a program need not count


def _memory(run: RunFacts) -> str:
    peak = max((metric.peak_memory_bytes for metric in run.metrics), default=0)
    return memory_size(peak) if peak else ""  # a program does not report it


ENDS: tuple[tuple[str, Callable[[RunFacts], str]], ...] = (
    ("State", lambda run: summarize(run).state),
    ("Steps", _steps),
    ("Tokens", lambda run: f"{run.metrics[-1].tokens:,}" if run.metrics and run.metrics[-1].tokens else ""),
    (LOSS, _loss),
    ("Held-out loss, last", lambda run: loss_number(run.evaluations[-1].loss) if run.evaluations else ""),
    (BEST, lambda run: f"{best.criterion} {best.figure} after step {best.step:,}"
     if (best := best_evaluation(run.evaluations)) else ""),
    ("Best checkpoint", lambda run: f"{run.best.path.name}, {run.best.evaluation.figure}" if run.best else ""),
    ("Tokens per second", _speed),
    ("Wall clock", _wall_clock),
    ("Used", lambda run: run.usage.words() if run.usage else ""),
    ("Peak memory", _memory),
    ("Attempts", lambda run: str(run.attempt)),
    ("Layout", lambda run: layout(run.placement, run.spec, run.plan, run.program)),
)
