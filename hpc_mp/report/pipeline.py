"""The executed pipeline, rank by rank, and its schedule simulated without delays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.layout.placement import Placement, RankPlace
from hpc_mp.layout.schedule import Kind, Schedule, Timeline, schedule_of, simulate
from hpc_mp.layout.schedule.actions import COMPUTE, compute
from hpc_mp.layout.schedule.simulate import Slot
from hpc_mp.report.grid import coordinates
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
        schedule = schedule_of(spec)
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
