"""The head of the page: the run's state, the cause of a failure, its layout in one line, its key numbers, and its attempts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from hpc_mp.base.text import counted, duration, loss_number, memory_size, moment, number, percent
from hpc_mp.job import JobSpec, ProgramSpec
from hpc_mp.layout.placement import Placement
from hpc_mp.report.facts import RunFacts
from hpc_mp.rundir.failures import RankFailure, precedence
from hpc_mp.rundir.outcome import Cause
from hpc_mp.rundir.plan import RunPlan
from hpc_mp.rundir.records import StepMetrics, losses
from hpc_mp.rundir.retention import best_evaluation
from hpc_mp.rundir.usage import Usage

# In the main log: failed saves, failed ranks and attempts, checkpoints that a resume skipped.
PROBLEM = re.compile(r"FAILED| failed: |is skipped: ")
WARNING = "warning: "
MOST_LINES = 50
UNSAVED = "the last checkpoint could not be saved"


@dataclass(frozen=True, slots=True)
class Number:
    """A key number: its name, its value, and a note for comparison."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The state of the run. ``state``: completed, failed, stopped, running, or another state reported by the launcher. ``cause``
    is empty unless it failed; ``traceback`` is from the rank in the cause, if recorded."""

    state: str
    doing: str
    when: str
    layout: str
    cause: str
    traceback: str
    failures: tuple[RankFailure, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def summarize(facts: RunFacts) -> Summary:
    cause = facts.causes.get(facts.attempt)
    current = [failure for failure in facts.failures if failure.attempt == facts.attempt]
    failures = tuple(sorted(current, key=lambda failure: (cause is None or failure.rank != cause.rank,
                                                      precedence(failure.kind, failure.time))))
    state = _state(facts, cause)
    message = cause.message if cause and state == "failed" else ""
    return Summary(
        state=state,
        doing=_doing(facts) if state == "running" else "",
        when=_when(facts, state),
        layout=layout(facts.placement, facts.spec, facts.plan, facts.program),
        cause=message or (UNSAVED if state == "failed" else ""),
        traceback=next((failure.traceback for failure in failures if cause and failure.rank == cause.rank), ""),
        failures=failures,
        problems=_newest([f"{line.time} {line.text}".strip() for line in facts.log
                          if PROBLEM.search(line.text) and not (message and line.text.endswith(message))]),
        warnings=_newest([line.text.removeprefix(WARNING) for line in facts.log if line.text.startswith(WARNING)]),
    )


def layout(placement: Placement | None, spec: JobSpec | None, plan: RunPlan | None = None,
           program: ProgramSpec | None = None) -> str:
    """Return one line: nodes × ranks, degrees, layers of the stages, ZeRO, schedule, order, as far as known. The axes of a
    ``program`` are unknown unless its job names them."""
    parts = []
    if placement is not None and program is not None and program.program.axes is None:
        ranks = program.job.ranks_per_node if program.program.start == "node" else placement.ranks_per_node
        return (f"{placement.nodes} nodes × {ranks} = {placement.nodes * ranks} ranks" if placement.nodes > 1
                else f"{counted(ranks, 'rank')} on 1 node")
    if placement is not None:
        d = placement.degrees
        world = (f"{placement.nodes} nodes × {placement.ranks_per_node} = {d.world} ranks" if placement.nodes > 1
                 else f"{counted(d.world, 'rank')} on 1 node")
        context = f" × context {d.context}" if d.context > 1 else ""
        experts = f" with expert {d.expert}" if d.expert > 1 else ""
        parts += [world, f"tensor {d.tensor} × pipeline {d.pipeline}{context} × data {d.data}{experts}"]
    if plan is not None and len(plan.layers) > 1:
        parts.append(f"stages of {'+'.join(map(str, plan.layers))} layers")
    if spec is not None:
        batch = counted(spec.microbatches, "microbatch", "microbatches")
        sequences = counted(spec.microbatch_size, "sequence")
        parts += [f"ZeRO-{spec.parallel.zero}", f"{spec.parallel.schedule}, {batch} of {sequences}"]
    if placement is not None:
        parts.append(f"order {placement.order}")
    return " · ".join(parts)


def key_numbers(facts: RunFacts) -> tuple[Number, ...]:
    """Return the most important numbers; empty before the first step has ended."""
    if not facts.metrics:
        return ()
    last = facts.metrics[-1]
    steady = later_half(facts.metrics)
    span = f"median of steps {steady[0].step}–{steady[-1].step}" if len(steady) > 1 else f"step {last.step}"
    steps = f"{last.step:,} of {facts.spec.train.steps:,}" if facts.spec else f"{last.step:,}"
    peak = max(metric.peak_memory_bytes for metric in facts.metrics if metric.attempt == last.attempt)
    limits = [trace.memory.limit for trace in facts.traces.values() if trace.memory is not None and trace.memory.limit]
    held_out = facts.evaluations[-1] if facts.evaluations else None
    expected = facts.plan.expected if facts.plan else None
    dropped, samples = (median(getattr(metric, name) for metric in steady) for name in ("dropped_share", "samples_per_s"))
    return (
        Number("Steps", steps, f"{last.tokens:,} tokens"),
        _loss(facts.metrics),
        *([Number("Held-out loss", loss_number(held_out.loss), f"after step {held_out.step:,}")] if held_out else []),
        *([Number("Held-out accuracy", f"{held_out.accuracy:.4f}", f"macro F1 {held_out.macro_f1:.4f}")]
          if held_out and held_out.accuracy >= 0 else []),
        *_best(facts),
        *([Number("Dropped choices", f"{dropped:.2%}", f"of all expert choices of tokens, {span}")] if dropped >= 0 else []),
        Number("Tokens per second", number(median(metric.tokens_per_s for metric in steady)),
               f"{number(samples)} samples per second, {span}" if samples > 0 else span),
        *([Number("MFU", percent(used), f"of the GPUs' dense peak, {span}")]
          if (used := median(metric.mfu for metric in steady)) > 0 else []),
        Number("Step time", duration(median(metric.step_time_s for metric in steady)),
               f"{span}, predicted {duration(expected.seconds)}" if expected else span),
        *_used(facts.usage),
        *([Number("Peak memory", memory_size(peak), "fullest rank" + (f", of {memory_size(min(limits))}" if limits else "")
                  + (f", predicted {memory_size(expected.allocated)}" if expected else ""))] if peak else []),  # a program: none
    )


def _used(used: Usage | None) -> list[Number]:
    if used is None or not used.words():
        return []
    value, _, note = used.words().partition(", ")
    return [Number("Used", value, note)]


def _best(facts: RunFacts) -> Iterator[Number]:
    """Yield the best evaluation, and the best checkpoint."""
    best = best_evaluation(facts.evaluations)
    if best is None:
        return
    saved = f"best checkpoint: {facts.best.path.name}" if facts.best else "no checkpoint of an evaluated step"
    if facts.best and facts.best.evaluation.step != best.step:
        saved += f", {facts.best.evaluation.figure}"
    yield Number(f"Best held-out {best.criterion}", best.figure, f"after step {best.step:,}; {saved}")


def _loss(metrics: tuple[StepMetrics, ...]) -> Number:
    """Return the first and the last loss, and the number of steps without a loss."""
    values = losses(metrics)
    without = len(metrics) - len(values)
    steps = f"{counted(without, 'step')} without one" if without else ""
    if not values:
        return Number("Loss", "none", steps)
    change = loss_number(values[-1] - values[0], "+").replace("-", "−")
    return Number("Loss", f"{loss_number(values[0])} → {loss_number(values[-1])}", ", ".join(filter(None, (change, steps))))


def later_half(metrics: tuple[StepMetrics, ...]) -> tuple[StepMetrics, ...]:
    """Return the second half of the newest attempt's steps: the first ones warm up, and other attempts may have other layouts."""
    newest = tuple(metric for metric in metrics if metric.attempt == metrics[-1].attempt)
    return newest[len(newest) // 2:]


def name(path: Path, spec: JobSpec | None) -> str:
    """Return the job's name and the number of its run: ``demo 0001``."""
    return f"{spec.job.name if spec else path.parent.name} {path.name}"


def _state(facts: RunFacts, cause: Cause | None) -> str:
    if facts.verdict is not None:
        return facts.verdict.state
    phase = facts.status.phase if facts.status else ""
    all_done = bool(facts.spec and facts.metrics and facts.metrics[-1].step >= facts.spec.train.steps)
    rules = (
        (cause is not None or phase == "unsaved", "failed"),
        (phase == "stopped", "stopped"),
        (phase == "done" or (all_done and phase not in ("saving", "evaluating")), "completed"),
    )
    return next((state for holds, state in rules if holds), "running")


def _doing(facts: RunFacts) -> str:
    status = facts.status
    if status is None:
        return "no rank has reported yet" if not facts.starts else "ranks have started"
    return f"{status.phase}, {percent(status.done / status.total)}" if status.total else status.phase


def lifetime(facts: RunFacts, state: str) -> tuple[float, float] | None:
    """Return the unix seconds of the first rank's start and of the last record; None before the first."""
    times = [*(start.time for start in facts.starts), *(failure.time for failure in facts.failures)]
    times += [facts.status.time] if facts.status else []
    times += [facts.written] if facts.written is not None and state == "running" else []
    return (min(times), max(times)) if times else None


def _when(facts: RunFacts, state: str) -> str:
    span = lifetime(facts, state)
    if span is None:
        return "not started"
    begin, end = span
    attempts = f", {counted(facts.attempt, 'attempt')}" if facts.attempt > 1 else ""
    until = f"last sign of life {moment(end)}" if state == "running" else f"ended {moment(end)}"
    return f"started {moment(begin)}, {until} ({duration(end - begin)}{attempts})"


def _newest(lines: list[str]) -> tuple[str, ...]:
    lines = list(dict.fromkeys(lines))
    left_out = [f"({len(lines) - MOST_LINES:,} earlier ones are in log/main.log)"] if len(lines) > MOST_LINES else []
    return (*left_out, *lines[-MOST_LINES:])


def attempts(facts: RunFacts, state: str) -> tuple[SimpleNamespace, ...]:
    """Return a row per attempt, in words; empty texts are unknown. ``state``: that of the current attempt. Repeated steps count
    in the later attempt."""
    return tuple(_attempt(facts, number, state) for number in range(1, facts.attempt + 1))


def _attempt(facts: RunFacts, number: int, state: str) -> SimpleNamespace:
    began = min((start.time for start in facts.starts if start.attempt == number), default=None)
    steps = [metric.step for metric in facts.metrics if metric.attempt == number]
    current = number == facts.attempt
    cause = facts.causes.get(number)
    return SimpleNamespace(
        number=number,
        began="" if began is None else moment(began),
        layout=layout(facts.placement if current else facts.earlier.get(number), facts.spec if current else None,
                      program=facts.program),
        steps=f"{steps[0]}–{steps[-1]}" if steps else "none",
        end=cause.message if cause else (state if current else "resumed"),
    )
