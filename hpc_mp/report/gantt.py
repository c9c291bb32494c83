"""Gantt charts: the pipeline as executed, rank by rank, and its schedule simulated with equal stages and without delays."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median
from types import SimpleNamespace

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import duration, percent, short_unit
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import undivided
from hpc_mp.layout.placement import Placement, RankPlace
from hpc_mp.layout.schedule import Kind, Schedule, Timeline, simulate
from hpc_mp.layout.schedule.actions import COMPUTE, compute
from hpc_mp.layout.schedule.simulate import Slot
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.report.axes import Scale, Tick, rounds
from hpc_mp.report.grid import coordinates, present_axes, shade
from hpc_mp.rundir.records import RankTrace, TracedAction

MOST_RANKS = 8  # beyond this: the whole pipelines that fit, at least one

LOOPED = "({p} − 1) / ({v} + {p} − 1)"
FORMULAS = {
    **dict.fromkeys(("gpipe", "simple", "1f1b", "interleaved_1f1b", "breadth_first"), LOOPED),
    "zero_bubble": "({p} − 1) (F + I − W) / ({m} (F + I + W) + ({p} − 1) (F + I − W))",
    "zero_bubble_v": "({p} − 1) F / ({v} (F + I + W) + ({p} − 1) F) if F, I and W take equal time",
}
"""Schedule → its bubble over equal stages with M microbatches, at least P of them (zero_bubble_v: 2 P − 1), {v} = V × M."""


@dataclass(frozen=True, slots=True)
class Line:
    """The content of a row: pipeline rank ``stage`` and actions in seconds from the start."""

    label: str
    detail: str
    stage: int
    spans: tuple[TracedAction, ...]


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle shares of the pipeline, 0 … 1: as executed, with the stages' own median times and no delays, and with equal stages;
    ``formula`` is the formula of the last."""

    measured: float
    own_times: float
    ideal: float
    formula: str


def chosen(placement: Placement, traced: Mapping[int, RankTrace]) -> tuple[list[RankPlace], str]:
    """Return the ranks to draw, pipeline by pipeline, and a text that names the selection."""

    def chain(place: RankPlace) -> tuple[int, int, int]:
        return place.dp, place.cp, place.tp

    chains = [list(places) for _, places in groupby(sorted(placement.ranks, key=lambda p: (chain(p), p.pp)), chain)]
    chains.sort(key=lambda places: -sum(place.rank in traced for place in places))  # stable: else the first ones
    fitting = max(1, MOST_RANKS // placement.degrees.pipeline)
    drawn = [place for places in chains[:fitting] for place in places]
    present = [place for place in drawn if place.rank in traced]
    sentences = []
    if len(chains) > fitting:
        sentences.append(f"{fitting} of the {len(chains)} pipelines (one for every replica and tensor rank)"
                     if placement.degrees.pipeline > 1 else f"{fitting} of the {len(chains)} ranks")
    if absent := [str(place.rank) for place in drawn if place.rank not in traced]:
        sentences.append(f"no trace yet of rank {', '.join(absent)}")
    return present, "; ".join(sentences)


def executed(places: Sequence[RankPlace], traced: Mapping[int, RankTrace], axes: tuple[str, ...]) -> list[Line]:
    """Return the ranks' actions, in seconds from the first action of all."""
    origin = min(span.start for place in places for span in traced[place.rank].actions)
    return [
        Line(f"rank {place.rank}", coordinates(place, axes), place.pp,
             tuple(span._replace(start=span.start - origin, end=span.end - origin)
                   for span in traced[place.rank].actions))
        for place in places
    ]


def compared(lines: Sequence[Line], spec: JobSpec) -> tuple[Timeline | None, Bubble | None]:
    """Return the ideal timeline and the bubble; None for both if a kind of computation was not measured, or if the job's own
    schedule table no longer exists."""
    p = spec.parallel
    computed = [span for line in lines for span in line.spans if span.kind in COMPUTE and span.end > span.start]
    try:
        schedule = schedule_of(undivided(spec))
    except HpcMpError:
        return None, None
    if {span.kind for span in computed} != {action.kind for actions in compute(schedule) for action in actions}:
        return None, None
    wall = wall_time(lines)
    equal = _ideal(computed, schedule, per_stage=False)
    formula = FORMULAS.get(p.schedule, "the table's")
    return equal, Bubble(
        measured=fmean(idle(line, wall) for line in lines),
        own_times=_ideal(computed, schedule, per_stage=True).bubble,
        ideal=equal.bubble,
        formula=formula.format(p=p.pipeline, m=spec.microbatches, v=spec.stages // p.pipeline * spec.microbatches),
    )


def simulated(timeline: Timeline) -> list[Line]:
    """Return a timeline as lines, one for every pipeline rank."""

    def line(rank: int, slots: Sequence[Slot]) -> Line:
        stages = ", ".join(map(str, sorted({slot.action.stage for slot in slots})))
        spans = (TracedAction(slot.action.kind, slot.action.stage, slot.action.microbatch, slot.start, slot.end)
                 for slot in slots)
        return Line(f"stage {stages}", "", rank, tuple(spans))

    return [line(rank, slots) for rank, slots in enumerate(timeline.ranks)]


def wall_time(lines: Iterable[Line]) -> float:
    """Return the seconds from the first to the last computation of all lines."""
    computed = [span for line in lines for span in line.spans if span.kind in COMPUTE]
    return max((span.end for span in computed), default=0) - min((span.start for span in computed), default=0)


def idle(line: Line, wall: float) -> float:
    """Return the share of ``wall`` seconds in which a rank is idle."""
    busy = sum(span.end - span.start for span in line.spans if span.kind in COMPUTE)
    return max(0.0, 1 - busy / wall) if wall > 0 else 0.0


def _ideal(computed: Iterable[TracedAction], schedule: Schedule, per_stage: bool) -> Timeline:
    """Return a schedule with the median times of each kind of computation: over all stages, or ``per_stage``."""
    times: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    for span in computed:
        for key in ((span.kind, None), (span.kind, span.stage)):
            times[key].append(span.end - span.start)

    def time(kind: Kind, stage: int) -> float:
        """Return the median time; a stage without a trace is as fast as the others."""
        return median((per_stage and times.get((kind, stage))) or times[kind, None])

    kinds = {kind for kind in COMPUTE if (kind, None) in times}
    return simulate(schedule, {kind: {stage: time(kind, stage) for stage in range(schedule.stages)} for kind in kinds})


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


def gantt(traces: Mapping[int, RankTrace], placement: Placement, spec: JobSpec) -> SimpleNamespace | None:
    """Return the charts of one step; None if no rank has traced one. ``ideal`` and ``bubble`` are None without a pipeline;
    ``legend`` names the classes that occur."""
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
    step = traced[places[0].rank].step
    return SimpleNamespace(step=step, executed=done, ideal=ideal, bubble=bubble, legend=legend, shown=shown)


def _chart(lines: Sequence[Line], x: Scale, stages: int) -> SimpleNamespace:
    """Return a row per rank over time, from the first action on, with its idle share; ``took``: time from the first computation
    to the last, in words."""
    unit, name = short_unit(x.high)
    wall = wall_time(lines)
    rows = []
    for i, line in enumerate(lines):
        boxes, slivers = _boxes(line.spans, x, lambda seconds: f"{seconds / unit:.4g} {name}")
        y = i * ROW + i // stages * BETWEEN + (ROW - BAR) / 2
        rows.append(SimpleNamespace(label=line.label, detail=line.detail, shade=shade(line.stage, stages), y=y, boxes=boxes,
                                    slivers=slivers, idle=percent(idle(line, wall))))
    values = rounds(0, x.high / unit, 8)
    labels = [f"{value:.6g}" for value in values[:-1]] + [f"{values[-1]:.6g} {name}"]
    marks = tuple(Tick(x(value * unit), label) for value, label in zip(values, labels, strict=True))
    return SimpleNamespace(rows=rows, ticks=marks, height=round(rows[-1].y + ROW), took=duration(wall))


def _boxes(spans: Sequence[TracedAction], x: Scale,
           time: Callable[[float], str]) -> tuple[list[SimpleNamespace], dict[str, str]]:
    """Return a box for each action, and the SVG path of those too narrow for one, by CSS class. Only boxes have a number, if it
    fits, and a hover text."""
    boxes = []
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
        boxes.append(SimpleNamespace(kind=kind, x=left, width=width, text=number if fits else "", tip=tip))
    return boxes, slivers
