"""Predicted against observed: the seconds and the bytes of a run's steps next to its plan, and the likely culprit if they differ.

Steps of an attempt count without its first two, once there are eight. A slow step loses its time in one of six places, and the
ranks' own records of the traced step say how much in each: a rank that computes longer than its peers; a pipeline rank that does
so relative to what is predicted; messages that arrive late though they were sent in time; computations of all ranks; sums over
data ranks; and what no rank records. The largest is named.
Ranks that wait for each other inside of their passes, for tensors (``tensor``) or parameters (ZeRO-3), seem to compute alike.
"""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import median, median_low

from hpc_mp.base.text import duration, memory_size, several
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.plan import ExpectedStep, read_plan
from hpc_mp.rundir.records import RankStart, RankTrace, StepMetrics, last_records, read_record, read_records

LAST, WARM, ENOUGH = 20, 2, 8  # steps that are read, that are left out of them, and that are needed
OFF = 1.3  # ratio, or its inverse, that is reported …
SMALL_S, SMALL = 0.05, 0.05  # … unless the difference is at most so many seconds, or this share of the GPU's memory
SLOW, TRACES = 1.15, 1024  # ratio of a slow rank's computations to those of its peers; traces that are read at most
COMPUTE, AFTER = ("F", "B", "I", "W"), ("reduce", "publish", "update")  # traced actions; parts of a step that follow its passes
MACHINE = "machine"  # the culprit that is a trait of the machine


@dataclass(frozen=True, slots=True)
class ObservedSteps:
    """Seconds of a step, and bytes that the fullest rank holds, next to what was expected; warnings; and the place where a step
    loses its time, empty if it does not."""

    expected: ExpectedStep
    seconds: float
    peak: int
    warnings: tuple[str, ...]
    culprit: str = ""

    @property
    def words(self) -> str:
        seconds, size = self.expected.seconds, self.expected.allocated
        return (f"a step takes {duration(self.seconds)}, {self.seconds / seconds:.2f} of the predicted {duration(seconds)}; the "
                f"fullest rank holds {memory_size(self.peak)}, {self.peak / size:.2f} of the predicted {memory_size(size)}")


def observe(run: RunDirectory, attempt: int) -> ObservedSteps | None:
    """Compare the current attempt with its plan; None if the plan predicts nothing, or before enough steps. Raises OSError."""
    expected = None if (plan := read_plan(run)) is None else plan.expected
    steps = [step for step in last_records(run.metrics, StepMetrics, LAST) if step.attempt == attempt] if expected else []
    if expected is None or len(steps) < ENOUGH:
        return None
    seconds, peak, size = median(step.step_time_s for step in steps[WARM:]), steps[-1].peak_memory_bytes, expected.allocated
    slow, large = _off(seconds, expected.seconds, SMALL_S), _off(peak, size, SMALL * expected.memory)
    traces, warnings, place = _traces(run, attempt, TRACES if slow or large else 1), [], ""
    limit = max((trace.memory.limit for trace in traces.values() if trace.memory), default=0) if expected.on_gpus else 0
    if slow:
        place, culprit = MACHINE, f"{expected.gpu} is faster than its row of the catalogue, or another GPU"
        if seconds > expected.seconds:
            place, culprit = _blamed(run, attempt, steps[-1].step, traces, expected, seconds)
        warnings.append(f"a step takes {duration(seconds)}, {slow} than predicted ({duration(expected.seconds)}): {culprit}")
    if limit and abs(limit - expected.memory) > SMALL * expected.memory:
        warnings.append(f"the GPUs have {memory_size(limit)}, in the catalogue's row of {expected.gpu} they have "
                        f"{memory_size(expected.memory)}: it is wrong, or not theirs")
    if large:
        warnings.append(f"a rank holds {memory_size(peak)}, {large} than predicted ({memory_size(size)}): the planner misjudges "
                        "this model")
    return ObservedSteps(expected, seconds, peak, tuple(warnings), place)


def _off(observed: float, predicted: float, small: float) -> str:
    """Return by how much a value is off, in words; empty if that is not worth a word."""
    if predicted / OFF <= observed <= predicted * OFF or abs(observed - predicted) <= small:
        return ""
    return f"{100 * abs(observed / predicted - 1):.0f} % {'more' if observed > predicted else 'less'}"


def _traces(run: RunDirectory, attempt: int, limit: int) -> dict[int, RankTrace]:
    """Return traces of the attempt by rank, evenly distributed if there are more than ``limit``."""
    paths, traces = run.trace.found(), []
    for path in paths[::-(-len(paths) // limit) or 1]:
        with suppress(OSError, ValueError):
            traces.append(read_record(path, RankTrace))
    return {trace.rank: trace for trace in traces if trace.attempt == attempt and trace.actions}


def _blamed(run: RunDirectory, attempt: int, last: int, traces: Mapping[int, RankTrace], expected: ExpectedStep,
            seconds: float) -> tuple[str, str]:
    """Return the place where steps up to the ``last`` lose most time, and the culprit in words; both unknown if the traced step
    was not slow."""
    starts = {start.rank: start for start in read_records(run.ranks, RankStart) if start.attempt == attempt}
    placed = {rank: trace for rank, trace in traces.items() if rank in starts}
    if not placed:
        return "unknown", "no rank has left a trace"
    traced = max(trace.step for trace in placed.values())
    then = next((step.step_time_s for step in last_records(run.metrics, StepMetrics, last - traced + LAST)
                 if (step.step, step.attempt) == (traced, attempt)), seconds)
    if then <= expected.seconds * OFF:
        return "unknown", f"step {traced}, the last that ranks have recorded, was not slow"
    return _culprit(placed, starts, expected, min(then, seconds))


def _culprit(traces: Mapping[int, RankTrace], starts: Mapping[int, RankStart], expected: ExpectedStep,
             seconds: float) -> tuple[str, str]:
    """Return the place where a step of so many seconds loses most time, and the culprit in words."""
    busy = {rank: sum(span.end - span.start for span in trace.actions if span.kind in COMPUTE) for rank, trace in traces.items()}
    where = {rank: f"rank {rank} on {start.node}" for rank, start in starts.items()}
    peers: dict[int, dict[int, float]] = {}  # pipeline rank → data rank → seconds: of tensor ranks, who wait for each other, one
    for rank in busy:
        peers.setdefault(starts[rank].pp, {}).setdefault(starts[rank].dp, busy[rank])
    usual = {stage: median_low(times.values()) for stage, times in peers.items()}
    shares = {stage: time / expected.passes[stage] for stage, time in usual.items()}
    share, behind = median_low(shares.values()), max(shares, key=shares.__getitem__)
    slowest = max(busy, key=lambda rank: busy[rank] - usual[starts[rank].pp])
    ratio, relative = busy[slowest] / usual[starts[slowest].pp], shares[behind] / share
    (link, waited), every = _latest(traces, starts, slowest)
    times = [time for trace in traces.values() for span in trace.actions for time in (span.start, span.end)]
    after = seconds - (max(times) - min(times)) - sum(expected.parts.get(name, 0.0) for name in AFTER)
    sums = {"reduce", "publish"} & expected.parts.keys()
    nodes = several([*dict.fromkeys(starts[rank].node for rank in busy if starts[rank].pp == behind)])
    lost = {
        "rank": ((1 - 1 / ratio) * busy[slowest] * (ratio > SLOW),
                 f"{where[slowest]} computes {ratio:.2f} times as long as its peers"),
        "stage": ((shares[behind] - share) * expected.passes[behind] * (relative > SLOW),
                  f"pipeline rank {behind} on {nodes} computes {relative:.2f} times as long as others, by what is predicted"),
        "link": (waited, f"messages between {where[link[0]]} and {where[link[1]]} take {duration(waited)}: "
                         f"{'all links are' if every else 'this link is'} slow"),
        MACHINE: ((share - 1) * max(expected.passes),
                  f"all ranks compute {share:.2f} times as long as predicted: the catalogue's row of {expected.gpu} is wrong, "
                  "clocks are low, or other programs compute there"),
        "sums": (after * bool(sums), f"sums over data ranks take {duration(after)} longer than predicted: links are slow"),
        "outside": (after * (not sums), f"{duration(after)} are outside of the passes: the input or the host is slow"),
    }
    place = max(lost, key=lambda name: lost[name][0])
    return place, lost[place][1]


def _latest(traces: Mapping[int, RankTrace], starts: Mapping[int, RankStart],
            alone: int) -> tuple[tuple[tuple[int, int], float], bool]:
    """Return the two ranks whose messages take longest between them, twice ``alone`` without messages, and for how many seconds
    their receivers wait after they are sent; and True if those of other ranks take similarly long."""
    late = defaultdict[tuple[int, int], float](float, {(alone, alone): 0.0})
    sent = {(starts[rank].dp, starts[rank].cp, starts[rank].tp, span.kind[-1], span.stage, span.microbatch): (rank, span.end)
            for rank, trace in traces.items() for span in trace.actions if span.kind.startswith("SEND")}
    for rank, trace in traces.items():
        for span in trace.actions:
            origin = span.stage - 1 if span.kind == "RECV_F" else span.stage + 1
            axes = starts[rank].dp, starts[rank].cp, starts[rank].tp
            if span.kind.startswith("RECV") and (sender := sent.get((*axes, span.kind[-1], origin, span.microbatch))):
                late[min(sender[0], rank), max(sender[0], rank)] += max(0.0, span.end - max(span.start, sender[1]))
    worst = max(late, key=late.__getitem__)
    return (worst, late[worst]), len(late) > 2 and median_low(sorted(late.values())[1:]) > late[worst] / 2
