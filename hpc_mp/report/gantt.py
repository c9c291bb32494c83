"""The pipeline as executed, and as it would be with equal stages and no waiting for messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median

from hpc_mp.job import JobSpec
from hpc_mp.placement import Placement, RankPlace
from hpc_mp.report.axes import Scale, Tick, rounds
from hpc_mp.report.facts import Span, Trace
from hpc_mp.report.grid import Shade, coordinates, present_axes, shade
from hpc_mp.report.words import duration, percent, short_unit
from hpc_mp.schedule import Timeline, build, simulate

WIDTH, LEFT, RIGHT = 1080, 132, 78
ROW, BAR = 26, 20
MOST_RANKS = 8  # beyond: whole pipelines, as many as fit and one at least
NARROWEST = 4.0  # pixels; what is narrower is drawn without number and hover text
DIGIT = 6.4
COMPUTING = ("F", "B")

# kind: (CSS class, what the hover text calls it). SENDs only hand a message over.
KINDS: dict[str, tuple[str, str]] = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "RECV_F": ("wait", "waiting for the input"),
    "RECV_B": ("wait", "waiting for the output gradient"),
    "SEND_F": ("send", "sending the output"),
    "SEND_B": ("send", "sending the input gradient"),
    "REDUCE": ("reduce", "reducing gradients"),
    "CLIP": ("clip", "clipping"),
    "OPTIMIZER": ("optimizer", "optimizer"),
}
LEGEND = (("forward", "forward"), ("backward", "backward"), ("wait", "waiting for a message"), ("send", "send"),
          ("reduce", "gradient reduction"), ("clip", "clipping"), ("optimizer", "optimizer"), ("other", "other"))


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
    """One rank. ``slivers``: CSS class → an SVG path of the actions too narrow for a box. ``idle``: its share of the time."""

    label: str
    detail: str
    shade: Shade
    y: float
    boxes: tuple[Box, ...]
    slivers: Mapping[str, str]
    idle: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Rows over a time axis that starts with the first action."""

    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    height: int
    took: str


@dataclass(frozen=True, slots=True)
class Line:
    """What a row shows: pipeline rank ``stage`` and actions in seconds from the start."""

    label: str
    detail: str
    stage: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle shares of the pipeline, 0 … 1: as executed, with the stages' own median times and nothing in the way, and of
    equal stages, (P − 1) / (V M + P − 1) with P pipeline ranks, V stages on each and M microbatches (Narayanan et al. 2021)."""

    measured: float
    own_times: float
    ideal: float
    formula: str


@dataclass(frozen=True, slots=True)
class Gantt:
    """``ideal`` and ``bubble`` are None without a pipeline; ``legend`` names the classes that occur."""

    step: int
    executed: Chart
    ideal: Chart | None
    bubble: Bubble | None
    legend: tuple[tuple[str, str], ...]
    shown: str


def gantt(traces: Mapping[int, Trace], placement: Placement, spec: JobSpec) -> Gantt | None:
    """None when no rank has traced a step."""
    traced = {rank: trace for rank, trace in traces.items() if trace.actions}
    places, shown = chosen(placement, traced)
    if not places:
        return None
    rows = [traced[place.rank].actions for place in places]
    origin = min(span.start for row in rows for span in row)
    lines = [
        Line(f"rank {place.rank}", coordinates(place, present_axes(placement)), place.pp,
             tuple(span._replace(start=span.start - origin, end=span.end - origin) for span in row))
        for place, row in zip(places, rows, strict=True)
    ]
    computed = [span for row in rows for span in row if span.kind in COMPUTING]
    compared = spec.parallel.pipeline > 1 and {span.kind for span in computed} == set(COMPUTING)
    equal = _ideal(computed, spec, per_stage=False) if compared else None
    took = max(span.end for line in lines for span in line.spans)
    x = Scale(0, max(took, equal.makespan if equal else 0), LEFT, WIDTH - RIGHT)
    charts = [_chart(lines, x, spec.parallel.pipeline)]
    bubble = None
    if equal is not None:
        charts.append(_chart(_lines(equal), x, spec.parallel.pipeline))
        bubble = Bubble(fmean(_idle(rows)), _ideal(computed, spec, per_stage=True).bubble, equal.bubble, _formula(spec))
    present = {kind for chart in charts for row in chart.rows for kind in (*(box.kind for box in row.boxes), *row.slivers)}
    return Gantt(
        step=traced[places[0].rank].step,
        executed=charts[0],
        ideal=charts[1] if equal is not None else None,
        bubble=bubble,
        legend=tuple(entry for entry in LEGEND if entry[0] in present),
        shown=shown,
    )


def chosen(placement: Placement, traced: Mapping[int, Trace]) -> tuple[list[RankPlace], str]:
    """The ranks to draw, pipeline by pipeline, and in words which those are."""
    def chain(place: RankPlace) -> tuple[int, int, int]:
        return place.dp, place.cp, place.tp

    chains = [list(places) for _, places in groupby(sorted(placement.ranks, key=lambda p: (chain(p), p.pp)), chain)]
    chains.sort(key=lambda places: -sum(place.rank in traced for place in places))  # stable: else the first ones
    fitting = max(1, MOST_RANKS // placement.degrees.pipeline)
    drawn = [place for places in chains[:fitting] for place in places]
    present = [place for place in drawn if place.rank in traced]
    words = []
    if len(chains) > fitting:
        words.append(f"{fitting} of the {len(chains)} pipelines (one for every replica and tensor rank)"
                     if placement.degrees.pipeline > 1 else f"{fitting} of the {len(chains)} ranks")
    if absent := [str(place.rank) for place in drawn if place.rank not in traced]:
        words.append(f"no trace yet of rank {', '.join(absent)}")
    return present, "; ".join(words)


def _formula(spec: JobSpec) -> str:
    """The ideal's arithmetic, with this job's numbers."""
    p = spec.parallel
    return f"({p.pipeline} − 1) / ({p.virtual_stages * spec.microbatches} + {p.pipeline} − 1)"


def _chart(rows: Sequence[Line], x: Scale, stages: int) -> Chart:
    unit, name = short_unit(x.high)
    share = _idle([line.spans for line in rows])
    drawn = []
    for i, line in enumerate(rows):
        boxes, slivers = _boxes(line.spans, x, lambda seconds: f"{seconds / unit:.4g} {name}")
        drawn.append(Row(line.label, line.detail, shade(line.stage, stages), i * ROW + (ROW - BAR) / 2, boxes, slivers,
                         percent(share[i])))
    values = rounds(0, x.high / unit, 8)
    marks = tuple(Tick(x(value * unit), f"{value:.6g}" + (f" {name}" if value == values[-1] else "")) for value in values)
    return Chart(tuple(drawn), marks, len(drawn) * ROW, duration(max(line.spans[-1].end for line in rows)))


def _boxes(
    spans: Sequence[Span], x: Scale, time: Callable[[float], str]
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
        tip = f"{what}\n{time(span.end - span.start)}, from {time(span.start)} to {time(span.end)}"
        fits = kind in ("forward", "backward") and width >= DIGIT * len(number) + 3
        boxes.append(Box(kind, left, width, number if fits else "", tip))
    return tuple(boxes), slivers


def _ideal(spans: Iterable[Span], spec: JobSpec, per_stage: bool) -> Timeline:
    """The job's schedule with the median times of the forwards and backwards: of all stages, or of each its own."""
    p = spec.parallel
    times: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    for span in spans:
        for key in ((span.kind, None), (span.kind, span.stage)):
            times[key].append(span.end - span.start)

    def time(kind: str, stage: int) -> float:
        """A stage without a trace is as fast as the others."""
        return median((per_stage and times.get((kind, stage))) or times[kind, None])

    stages = range(p.pipeline * p.virtual_stages)
    return simulate(build(p.schedule, p.pipeline, spec.microbatches, p.virtual_stages),
                    forward={stage: time("F", stage) for stage in stages},
                    backward={stage: time("B", stage) for stage in stages})


def _lines(timeline: Timeline) -> list[Line]:
    lines = []
    for rank, slots in enumerate(timeline.ranks):
        stages = ", ".join(map(str, sorted({slot.action.stage for slot in slots})))
        spans = tuple(Span(slot.action.kind, slot.action.stage, slot.action.microbatch, slot.start, slot.end)
                      for slot in slots)
        lines.append(Line(f"stage {stages}", "", rank, spans))
    return lines


def _idle(rows: Sequence[Sequence[Span]]) -> list[float]:
    """Of every row the share of the time from the first to the last computation of all rows in which it computes nothing."""
    computed = [[span for span in row if span.kind in COMPUTING] for row in rows]
    every = [span for row in computed for span in row]
    wall = max((span.end for span in every), default=0) - min((span.start for span in every), default=0)
    busy = (sum(span.end - span.start for span in row) for row in computed)
    return [max(0.0, 1 - time / wall) if wall > 0 else 0.0 for time in busy]
