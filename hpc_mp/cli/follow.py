"""Repeated polling of runs until all have ended: in place on a terminal, else as lines of a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat

import click

from hpc_mp.runs.status import RunStatus

SECONDS = (2.0, 2.0, 2.0, 5.0)  # between two polls, the last repeated: each queries Slurm once, and schedulers serve many users
SILENCE_S = 30.0  # after which a log gets a line even without a change
Poll = Callable[[], Sequence[RunStatus]]


def follow(poll: Poll, text: Callable[[Sequence[RunStatus]], str], line: Callable[[RunStatus], str], *,
           quiet: bool) -> Sequence[RunStatus]:
    """Show the results of ``poll`` until all runs have ended, and return the last ones.

    Args:
        text: formats all runs, for a terminal.
        line: formats one run, for a log.
        quiet: True for no output, because a document follows.
    """
    polls = _polls(poll)
    if quiet:
        *_, last = polls
        return last
    return _in_place(polls, text) if sys.stdout.isatty() else _lines(polls, line)


def _polls(poll: Poll) -> Iterator[Sequence[RunStatus]]:
    """Yield the result of each poll until no run is active."""
    for seconds in chain(SECONDS, repeat(SECONDS[-1])):
        statuses = poll()
        yield statuses
        if not any(_goes_on(status) for status in statuses):
            return
        time.sleep(seconds)


def _goes_on(status: RunStatus) -> bool:
    return status.state in ("pending", "running", "unknown")


def _in_place(polls: Iterator[Sequence[RunStatus]], text: Callable[[Sequence[RunStatus]], str]) -> Sequence[RunStatus]:
    from rich.live import Live
    from rich.text import Text

    last: Sequence[RunStatus] = ()
    with Live(auto_refresh=False, vertical_overflow="visible") as live:
        for last in polls:
            live.update(Text(text(last)), refresh=True)
    return last


def _lines(polls: Iterator[Sequence[RunStatus]], line: Callable[[RunStatus], str]) -> Sequence[RunStatus]:
    """Print a line for each run whose state, activity or lateness has changed; not for every step."""
    last: Sequence[RunStatus] = ()
    states: dict[object, object] = {}
    before: dict[object, str | None] = {}
    last_print = 0.0
    for last in polls:
        silent = time.monotonic() - last_print >= SILENCE_S
        for status in last:
            if status.before != before.get(status.run):
                before[status.run] = status.before
                click.echo(f"{time.strftime('%H:%M:%S')} {line(status).partition(' ')[0]} before: {status.before}")
            state = (status.state, status.attempt, status.phase, status.late, status.job and status.job.reason, status.checkpoint)
            if states.get(status.run) != state or (silent and _goes_on(status)):
                states[status.run] = state
                last_print = time.monotonic()
                click.echo(f"{time.strftime('%H:%M:%S')} {line(status)}")
    return last
