"""The attempts of a run: when each began, on which layout, which of its steps remain, how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_mp.base.text import moment
from hpc_mp.report.facts import RunFacts
from hpc_mp.report.summary import layout


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One start of the run; all in words, empty where nothing is known."""

    number: int
    began: str
    layout: str
    steps: str
    end: str


def attempts(facts: RunFacts, state: str) -> tuple[AttemptRow, ...]:
    """``state``: that of the current attempt. Steps that a resume cut back are counted where they were done again."""
    return tuple(_attempt(facts, number, state) for number in range(1, facts.attempt + 1))


def _attempt(facts: RunFacts, number: int, state: str) -> AttemptRow:
    began = min((start.time for start in facts.starts if start.attempt == number), default=None)
    steps = [metric.step for metric in facts.metrics if metric.attempt == number]
    current = number == facts.attempt
    cause = facts.causes.get(number)
    return AttemptRow(
        number,
        began="" if began is None else moment(began),
        layout=layout(facts.placement if current else facts.earlier.get(number), facts.spec if current else None),
        steps=f"{steps[0]}–{steps[-1]}" if steps else "none",
        end=cause.message if cause else (state if current else "resumed"),
    )
