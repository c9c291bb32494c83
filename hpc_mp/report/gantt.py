"""Gantt charts: the pipeline as executed, and with equal stages and no waiting for messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpc_mp.base.text import duration, percent, short_unit
from hpc_mp.job import JobSpec
from hpc_mp.layout.placement import Placement
from hpc_mp.report.axes import Scale, Tick, rounds
from hpc_mp.report.colours import Shade
from hpc_mp.report.grid import present_axes, shade
from hpc_mp.report.pipeline import Bubble, Line, chosen, compared, executed, idle, simulated, wall_time
from hpc_mp.rundir.records import RankTrace, TracedAction

WIDTH, LEFT, RIGHT = 1080, 132, 78
ROW, BAR, BETWEEN = 26, 20, 6  # BETWEEN: additional space before the next pipeline
NARROWEST = 4.0  # pixels; narrower boxes are drawn without number and hover text
DIGIT = 6.4

# kind: (CSS class, name in the hover text). A SEND only submits a message.
KINDS: dict[str, tuple[str, str]] = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "I": ("backward", "input gradient"),
    "W": ("weight", "weight gradients"),
    "RECV_F": ("wait", "waiting for the input"),
    "RECV_B": ("wait", "waiting for the output gradient"),
    "SEND_F": ("send", "sending the output"),
    "SEND_B": ("send", "sending the input gradient"),
    "REDUCE": ("reduce", "reducing gradients"),
    "CLIP": ("clip", "clipping"),
    "OPTIMIZER": ("optimizer", "optimizer"),
}
LEGEND = (("forward", "forward"), ("backward", "backward"), ("weight", "weight gradients"),
          ("wait", "waiting for a message"), ("send", "send"), ("reduce", "gradient reduction"), ("clip", "clipping"),
          ("optimizer", "optimizer"), ("other", "other"))


@dataclass(frozen=True, slots=True)
class Box:
    """One action: CSS class, left edge and width in pixels, the number inside (if it fits) and the hover text."""

    kind: str
    x: float
    width: float
    text: str
    tip: str


@dataclass(frozen=True, slots=True)
class Row:
    """One rank. ``slivers``: CSS class → SVG path of the actions too narrow for a box; ``idle``: its idle share of the time."""

    label: str
    detail: str
    shade: Shade
    y: float
    boxes: tuple[Box, ...]
    slivers: Mapping[str, str]
    idle: str


@dataclass(frozen=True, slots=True)
class ScheduleChart:
    """Rows over time, from the first action on. ``took``: time from the first computation to the last, in words."""

    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    height: int
    took: str


@dataclass(frozen=True, slots=True)
class Gantt:
    """The charts of one step. ``ideal`` and ``bubble`` are None without a pipeline; ``legend`` names the classes that occur."""

    step: int
    executed: ScheduleChart
    ideal: ScheduleChart | None
    bubble: Bubble | None
    legend: tuple[tuple[str, str], ...]
    shown: str


def gantt(traces: Mapping[int, RankTrace], placement: Placement, spec: JobSpec) -> Gantt | None:
    """Return the charts; None if no rank has traced a step."""
    traced = {rank: trace for rank, trace in traces.items() if trace.actions}
    places, shown = chosen(placement, traced)
    if not places:
        return None
    lines = executed(places, traced, present_axes(placement))
    equal, bubble = compared(lines, spec) if placement.degrees.pipeline > 1 else (None, None)
    took = max(span.end for line in lines for span in line.spans)
    x = Scale(0, max(took, equal.makespan if equal else 0), LEFT, WIDTH - RIGHT)
    done = _chart(lines, x, placement.degrees.pipeline)
    ideal = _chart(simulated(equal), x, placement.degrees.pipeline) if equal else None
    rows = (*done.rows, *(ideal.rows if ideal else ()))
    present = {kind for row in rows for kind in (*(box.kind for box in row.boxes), *row.slivers)}
    legend = tuple(entry for entry in LEGEND if entry[0] in present)
    return Gantt(traced[places[0].rank].step, done, ideal, bubble, legend, shown)


def _chart(lines: Sequence[Line], x: Scale, stages: int) -> ScheduleChart:
    unit, name = short_unit(x.high)
    wall = wall_time(lines)
    rows = []
    for i, line in enumerate(lines):
        boxes, slivers = _boxes(line.spans, x, lambda seconds: f"{seconds / unit:.4g} {name}")
        y = i * ROW + i // stages * BETWEEN + (ROW - BAR) / 2
        share = percent(idle(line, wall))
        rows.append(Row(line.label, line.detail, shade(line.stage, stages), y, boxes, slivers, share))
    values = rounds(0, x.high / unit, 8)
    labels = [f"{value:.6g}" for value in values[:-1]] + [f"{values[-1]:.6g} {name}"]
    marks = tuple(Tick(x(value * unit), label) for value, label in zip(values, labels, strict=True))
    return ScheduleChart(tuple(rows), marks, round(rows[-1].y + ROW), duration(wall))


def _boxes(
    spans: Sequence[TracedAction], x: Scale, time: Callable[[float], str]
) -> tuple[tuple[Box, ...], dict[str, str]]:
    boxes: list[Box] = []
    slivers: dict[str, str] = {}
    for span in spans:
        kind, name = KINDS.get(span.kind, ("other", span.kind))
        left, width = x(span.start), round(x(span.end) - x(span.start), 1)
        if width < NARROWEST:
            if width > 0:
                slivers[kind] = slivers.get(kind, "") + f"M{left:g} 0h{width:g}v{BAR}h-{width:g}z"
            continue
        number = str(span.microbatch)
        what = f"{name} of microbatch {number}, stage {span.stage}" if span.microbatch >= 0 else name
        tip = f"{what}\n{duration(span.end - span.start)}, from {time(span.start)} to {time(span.end)}"
        fits = kind in ("forward", "backward", "weight") and width >= DIGIT * len(number) + 3
        boxes.append(Box(kind, left, width, number if fits else "", tip))
    return tuple(boxes), slivers
