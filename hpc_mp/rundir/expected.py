"""Predicted against observed: the seconds and the bytes of a run's steps next to its plan, and the likely culprit if they differ.

Steps of an attempt count without its first two, once there are eight. A warning names what the ranks' own records suggest: a rank
slower than its peers (same stage, same work), longer waits for messages, time outside of the passes, or none of these.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median, median_low

from hpc_mp.base.text import duration, memory_size
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.plan import Expectation, read_plan
from hpc_mp.rundir.records import RankStart, RankTrace, StepMetrics, last_records, read_record, read_records

LAST, WARM, ENOUGH = 20, 2, 8  # steps that are read, that are left out of them, and that are needed
OFF = 1.3  # ratio, or its inverse, that is reported …
SMALL_S, SMALL = 0.05, 0.05  # … unless the difference is at most so many seconds, or this share of the GPU's memory
SLOW, TRACES = 1.15, 64  # ratio of a slow rank's computations to those of its peers; traces that are read at most
# kinds of traced actions, and parts of a predicted step that follow its passes
COMPUTE, RECEIVE, AFTER = ("F", "B", "I", "W"), ("RECV_F", "RECV_B"), ("reduce", "publish", "update")


@dataclass(frozen=True, slots=True)
class Observed:
    """Seconds of a step, and bytes that PyTorch has allocated on the fullest rank, next to what was expected; warnings."""

    expected: Expectation
    seconds: float
    peak: int
    warnings: tuple[str, ...]

    @property
    def words(self) -> str:
        seconds, size = self.expected.seconds, self.expected.allocated
        return (f"a step takes {duration(self.seconds)}, {self.seconds / seconds:.2f} of the predicted {duration(seconds)}; the "
                f"fullest rank holds {memory_size(self.peak)}, {self.peak / size:.2f} of the predicted {memory_size(size)}")


def observe(run: RunDirectory, attempt: int) -> Observed | None:
    """Compare the current attempt with its plan; None if the plan predicts nothing, or before enough steps. Raises OSError."""
    expected = None if (plan := read_plan(run)) is None else plan.expected
    steps = [step for step in last_records(run.metrics, StepMetrics, LAST) if step.attempt == attempt] if expected else []
    if expected is None or len(steps) < ENOUGH:
        return None
    seconds, peak, size = median(step.step_time_s for step in steps[WARM:]), steps[-1].peak_memory_bytes, expected.allocated
    slow, large = _off(seconds, expected.seconds, SMALL_S), _off(peak, size, SMALL * expected.memory)
    traces, warnings = _traces(run, attempt) if slow or large else {}, []
    if slow:
        culprit = _culprit(run, traces, expected, seconds) if seconds > expected.seconds else f"{expected.gpu} may be another GPU"
        warnings.append(f"a step takes {duration(seconds)}, {slow} than predicted ({duration(expected.seconds)}): {culprit}")
    if large:
        limit = max((trace.memory.limit for trace in traces.values() if trace.memory), default=0)
        culprit = "the planner misjudges this model"
        if limit and abs(limit - expected.memory) > SMALL * expected.memory:
            culprit = f"the GPUs have {memory_size(limit)}, which is not {expected.gpu}: a wrong row of the catalogue"
        warnings.append(f"a rank holds {memory_size(peak)}, {large} than predicted ({memory_size(size)}): {culprit}")
    return Observed(expected, seconds, peak, tuple(warnings))


def _off(observed: float, predicted: float, small: float) -> str:
    """Return by how much a value is off, in words; empty if that is not worth a word."""
    if predicted / OFF <= observed <= predicted * OFF or abs(observed - predicted) <= small:
        return ""
    return f"{100 * abs(observed / predicted - 1):.0f} % {'more' if observed > predicted else 'less'}"


def _traces(run: RunDirectory, attempt: int) -> dict[int, RankTrace]:
    """Return the traces of the attempt by rank."""
    paths, traces = run.trace.found(), []
    for path in paths[::-(-len(paths) // TRACES) or 1]:
        with suppress(OSError, ValueError):
            traces.append(read_record(path, RankTrace))
    return {trace.rank: trace for trace in traces if trace.attempt == attempt and trace.actions}


def _culprit(run: RunDirectory, traces: Mapping[int, RankTrace], expected: Expectation, seconds: float) -> str:
    """Return what the traces of slow steps suggest."""
    if not traces:
        return "no rank has left a trace"
    busy = {rank: _seconds(trace, COMPUTE) for rank, trace in traces.items()}
    usual = {stage: median_low(busy[rank] for rank, trace in traces.items() if trace.pp == stage)
             for stage in {trace.pp for trace in traces.values()}}
    ratios = {rank: busy[rank] / max(usual[trace.pp], 1e-9) for rank, trace in traces.items()}
    if ratios[rank := max(ratios, key=ratios.__getitem__)] > SLOW:
        host = next((f" on {start.host}" for start in read_records(run.ranks, RankStart) if start.rank == rank), "")
        return f"rank {rank}{host} computes {ratios[rank]:.2f} times as long as its peers"
    waits = fmean(_seconds(trace, RECEIVE) for trace in traces.values()) - expected.parts.get("bubble", 0.0)
    ends = [[time for span in trace.actions for time in (span.start, span.end)] for trace in traces.values()]
    after = seconds - fmean(max(times) - min(times) for times in ends) - sum(expected.parts.get(name, 0.0) for name in AFTER)
    waits += after if "reduce" in expected.parts else 0.0
    if waits > (seconds - expected.seconds) / 2:
        return f"ranks wait {duration(waits)} longer for messages: links are slow, see `hpc-mp doctor`"
    if after > (seconds - expected.seconds) / 2:
        return f"{duration(after)} are outside of the passes: the input or the host is slow"
    return "all ranks compute alike: clocks are low, or the host is busy"


def _seconds(trace: RankTrace, kinds: Sequence[str]) -> float:
    return sum(span.end - span.start for span in trace.actions if span.kind in kinds)
