"""Overlaid curves of several runs, in one figure per quantity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

from hpc_mp.base.text import counted
from hpc_mp.report.axes import Scale, Tick, ticks
from hpc_mp.report.curves import AS_SAID, BOTTOM, HEIGHT, HUGE, LEFT, MOST_POINTS, RIGHT, SCALE_OVER_MEDIAN, TOP, WIDTH, thinned
from hpc_mp.report.facts import RunFacts

FLATTEST = 5  # the flattest run's curve has at least a fifth of the height
THROUGHPUT = "Throughput"
POINTS = 6_000  # in a figure with many runs: a browser draws them at once, and the page has a few hundred kB
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class OverlayPanel:
    """One figure: its heading, its quantity, and its axes.

    Attributes:
        points: points of a run, over its steps or over the unit named by ``along``.
        low: True if the y axis begins at 0 instead of the lowest value.
        dots: True if the points are few and marked individually.
    """

    title: str
    subtitle: str
    points: Callable[[RunFacts], Points]
    along: str = "step"
    low: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class OverlayLine:
    """A run's curve: ``at``, ``values`` and ``pixels`` correspond one to one; ``run`` is its number on the page."""

    run: int
    at: tuple[int, ...]
    values: tuple[float, ...]
    pixels: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Overlay:
    """One figure in pixels, and notes on points that could not be drawn."""

    panel: OverlayPanel
    lines: tuple[OverlayLine, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    notes: tuple[str, ...]


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


def overlays(runs: Sequence[RunFacts], labels: Sequence[str]) -> tuple[Overlay, ...]:
    """Return the figures with at least one point, including the loss by tokens if the runs' steps differ in size."""
    sizes = {run.metrics[-1].tokens // run.metrics[-1].step for run in runs if run.metrics and run.metrics[-1].step}
    panels: tuple[OverlayPanel, ...] = (PANELS[0], BY_TOKENS, *PANELS[1:]) if len(sizes) > 1 else PANELS
    if all(run.program is not None for run in runs):
        panels = tuple(panel if panel.title == THROUGHPUT else replace(panel, subtitle=AS_SAID) for panel in panels)
    return tuple(figure for panel in panels if (figure := overlay(panel, runs, labels)) is not None)


def overlay(panel: OverlayPanel, runs: Sequence[RunFacts], labels: Sequence[str]) -> Overlay | None:
    """Return one figure; None if no run has a finite value, or if programs reported no value: their values are then 0."""
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
    return Overlay(
        panel,
        lines=tuple(_line(number, thinned(points, limit), x, y, high) for number, points in enumerate(finite) if points),
        x_ticks=ticks(x, 6, whole=True),
        y_ticks=ticks(y, 6),
        notes=tuple(notes),
    )


def _line(number: int, points: Points, x: Scale, y: Scale, high: float) -> OverlayLine:
    return OverlayLine(number, tuple(at for at, _ in points), tuple(value for _, value in points),
                       tuple((x(at), y(min(value, high))) for at, value in points))


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
