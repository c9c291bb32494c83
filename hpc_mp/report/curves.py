"""Curves over the steps of a run: loss, gradient norm, throughput, step time, learning rate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from types import SimpleNamespace

from hpc_mp.base.text import counted, number
from hpc_mp.report.axes import Scale, ticks
from hpc_mp.rundir.records import Evaluation, StepMetrics

WIDTH, HEIGHT = 540, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 26
MOST_POINTS = 600
LABEL_WIDTH, LABEL_GAP = 64, 4  # of "attempt 123"
SCALE_OVER_MEDIAN = 3  # a warm-up step takes much longer than the others and must not flatten them
HUGE = 1e300  # larger differences cannot be computed; NaN is not below it either


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure: its heading and quantity, and flags for an axis from 0, cut outliers, and the held-out loss."""

    title: str
    subtitle: str
    value: Callable[[StepMetrics], float]
    from_zero: bool = False
    outliers: bool = False
    held_out: bool = False


PANELS = (
    Panel("Loss", "mean over all tokens of the global batch", lambda metric: metric.loss, held_out=True),
    Panel("Gradient norm", "L2 over all parameters, before clipping", lambda metric: metric.grad_norm),
    Panel("Throughput", "tokens per second, all ranks together", lambda metric: metric.tokens_per_s, from_zero=True,
          outliers=True),
    Panel("Step time", "seconds", lambda metric: metric.step_time_s, from_zero=True, outliers=True),
    Panel("Learning rate", "after warm-up and schedule", lambda metric: metric.learning_rate, from_zero=True),
)


@dataclass(frozen=True, slots=True)
class Resume:
    """The start of a later attempt: the pixels of its first step and of its label; None if the label would overlap another."""

    at: float
    attempt: int
    label: float | None = None


AS_SAID = "as reported by the program"


def curves(metrics: Sequence[StepMetrics], evaluations: Sequence[Evaluation] = (),
           of_program: bool = False) -> tuple[SimpleNamespace, ...]:
    """Return the figures; empty before the first step has ended. For a program, return only the reported quantities."""
    if not metrics:
        return ()
    panels = PANELS if not of_program else tuple(
        panel if panel.outliers else replace(panel, subtitle=AS_SAID) for panel in PANELS
        if any(0 < abs(panel.value(metric)) < HUGE for metric in metrics))
    return tuple(curve(panel, metrics, evaluations if panel.held_out else ()) for panel in panels)


def curve(panel: Panel, metrics: Sequence[StepMetrics], evaluations: Sequence[Evaluation] = ()) -> SimpleNamespace:
    """Return one figure in pixels. ``steps``, ``values`` and ``points`` correspond one to one; ``held_out`` are evaluations.
    ``metrics`` must hold at least one step."""
    every = [(metric.step, panel.value(metric)) for metric in metrics]
    finite = [(step, value) for step, value in every if abs(value) < HUGE]
    drawn = thinned(finite, MOST_POINTS)
    held_out = [(evaluation.step, evaluation.loss) for evaluation in evaluations
                if abs(evaluation.loss) < HUGE and evaluation.step >= metrics[0].step]
    low, high = _range(panel, [value for _, value in (*finite, *held_out)] or [0.0])
    x = Scale(metrics[0].step, metrics[-1].step, LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    notes = [f"{counted(len(every) - len(finite), 'step')} not finite"] if len(finite) < len(every) else []
    if above := [(value, step) for step, value in finite if value > high]:
        largest, at = max(above)
        notes.append(f"{counted(len(above), 'step')} above the scale, the highest {number(largest)} at step {at}")
    return SimpleNamespace(
        panel=panel,
        steps=tuple(step for step, _ in drawn),
        values=tuple(value for _, value in drawn),
        points=tuple((x(step), y(min(value, high))) for step, value in drawn),
        held_out=tuple((x(step), y(value)) for step, value in thinned(held_out, MOST_POINTS)),
        x_ticks=ticks(x, 6, whole=True),
        y_ticks=ticks(y, 6),
        resumes=labelled([Resume(x(after.step), after.attempt) for before, after in pairwise(metrics)
                          if after.attempt != before.attempt], x.end),
        notes=tuple(notes),
    )


def labelled(resumes: Sequence[Resume], end: float) -> tuple[Resume, ...]:
    """Add labels that do not overlap, the newest first, up to the pixel ``end``."""
    marks, free = [], end
    for resume in reversed(resumes):
        beside = resume.at + LABEL_GAP, resume.at - LABEL_GAP - LABEL_WIDTH  # its line, on either side
        label = next((left for left in beside if 0 <= left <= free - LABEL_WIDTH), None)
        free = free if label is None else label - LABEL_GAP
        marks.append(replace(resume, label=label))
    return tuple(reversed(marks))


def thinned(points: Sequence[tuple[int, float]], limit: int) -> Sequence[tuple[int, float]]:
    """Return at most ``limit`` of the points: the lowest and the highest of every stretch, to preserve spikes."""
    if len(points) <= limit:
        return points
    stretches = limit // 2 - 1  # the first and the last point are kept as well
    indices = {0, len(points) - 1}
    for stretch in range(stretches):
        span = range(stretch * len(points) // stretches, (stretch + 1) * len(points) // stretches)
        indices |= {min(span, key=lambda i: points[i][1]), max(span, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(indices)]


def _range(panel: Panel, values: Sequence[float]) -> tuple[float, float]:
    if panel.from_zero:
        highest = min(max(values), SCALE_OVER_MEDIAN * median(values)) if panel.outliers else max(values)
        return 0.0, 1.08 * highest
    margin = 0.05 * (max(values) - min(values))
    return min(values) - margin, max(values) + margin
