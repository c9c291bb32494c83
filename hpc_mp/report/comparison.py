"""A comparison of several runs on one page: overlaid curves, the differences of their job files, and their results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hpc_mp.base.text import counted, duration, loss_number, memory_size, number
from hpc_mp.job import AnySpec
from hpc_mp.job.sweep import words_of
from hpc_mp.job.values import leaves, toml_value
from hpc_mp.report import curves
from hpc_mp.report.facts import RunFacts, read_facts
from hpc_mp.report.html import HERE, filled, publish
from hpc_mp.report.overlay import overlays
from hpc_mp.report.page import HIDDEN
from hpc_mp.report.summary import later_half, layout, lifetime, name, summarize
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.records import losses
from hpc_mp.rundir.retention import best_evaluation
from hpc_mp.rundir.sweep import best_of

COLOURS = 7  # of page.css; further lines repeat the colours, dashed
DASHES = 4
NONE = "–"
LOSS = "Loss, first and last"
SECRET = ("environment.set.", "program.environment.")


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A row of a table: its subject, and a text for each run. ``marked``: the run with the best value; None without one."""

    what: str
    cells: tuple[str, ...]
    marked: int | None = None


def write_comparison(runs: Sequence[RunDirectory], page: Path | None = None) -> Path:
    """Write ``comparison.html`` into the first run, or another ``page``.

    Raises:
        HpcMpError: the page cannot be written.
    """
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
    by_loss = _best_by_loss(runs)
    rows = [ComparedRow(what, tuple(text(run) or NONE for run in runs), by_loss if what == LOSS else None) for what, text in ENDS]
    best = [best_evaluation(run.evaluations) for run in runs]
    cells = tuple(f"{loss_number(evaluation.loss)} after step {evaluation.step:,}" if evaluation else NONE for evaluation in best)
    losses_by_run = {index: evaluation.loss for index, evaluation in enumerate(best) if evaluation is not None}
    comparable = len(losses_by_run) > 1 and _same_text(runs)
    marked = min(losses_by_run, key=lambda index: losses_by_run[index]) if comparable else None
    rows.insert(BEST_AT, ComparedRow("Best held-out loss", cells, marked))
    return tuple(row for row in rows if any(cell != NONE for cell in row.cells))


def _best_by_loss(runs: Sequence[RunFacts]) -> int | None:
    """Return the best run of a sweep without held-out losses. Unrelated runs may have losses on different texts."""
    if len({(run.path.resolve().parent, run.sweep.first) if run.sweep else run.path for run in runs}) > 1:
        return None
    series = [losses(run.metrics) for run in runs]
    best = best_of((values[-1] if values else None, min((evaluation.loss for evaluation in run.evaluations), default=None))
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


def _tokens(run: RunFacts) -> str:
    return f"{run.metrics[-1].tokens:,}" if run.metrics and run.metrics[-1].tokens else ""


ENDS: tuple[tuple[str, Callable[[RunFacts], str]], ...] = (
    ("State", lambda run: summarize(run).state),
    ("Steps", _steps),
    ("Tokens", _tokens),
    (LOSS, _loss),
    ("Held-out loss, last", lambda run: loss_number(run.evaluations[-1].loss) if run.evaluations else ""),
    ("Best checkpoint", lambda run: f"{run.best.path.name}, {loss_number(run.best.loss)}" if run.best else ""),
    ("Tokens per second", _speed),
    ("Wall clock", _wall_clock),
    ("Used", lambda run: run.usage.words() if run.usage else ""),
    ("Peak memory", _memory),
    ("Attempts", lambda run: str(run.attempt)),
    ("Layout", lambda run: layout(run.placement, run.spec, run.plan, run.program)),
)
BEST_AT = 5  # index of the row after the last held-out loss
