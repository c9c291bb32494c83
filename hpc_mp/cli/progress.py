"""The progress of a launch: lines, and on a terminal a bar while ranks train."""

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hpc_mp.base.text import data_size, duration, escaped, loss_number, speed
from hpc_mp.cluster.slurm.jobs import WAITING
from hpc_mp.launch.listener import Listener
from hpc_mp.rundir.records import Evaluation, RankStatus, StepMetrics

LINE_S = 30.0  # between two lines of progress without a terminal
RECENT = 20  # the median time of these steps predicts the remaining time


class TerminalListener(Listener):
    """Listener that prints to standard output, and notes to standard error. On a terminal, a bar shows the phase before the first
    step, then step, loss, tokens per second and the remaining time. Without a terminal, lines replace the bar. ``aside``: True to
    print to standard error, because standard output is for a document or a script."""

    def __init__(self, *, aside: bool) -> None:
        self._aside = aside
        self._terminal = sys.stderr.isatty()
        self._bar: _StepBar | _StepLines | None = None
        self.interval = 0.25 if self._terminal else 1.0

    def say(self, text: str) -> None:
        click.echo(escaped(text), err=self._aside)

    def note(self, text: str) -> None:
        text = escaped(text)
        if self._bar is not None:
            self._bar.print(text)
        else:
            click.echo(text, err=True)

    def begin(self, steps: int) -> None:
        self._bar = _StepBar(steps) if self._terminal else _StepLines(steps)

    def update(self, status: RankStatus | None, steps: Sequence[StepMetrics]) -> None:
        if self._bar is not None:
            self._bar.update(status, steps)

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        for evaluation in evaluations:
            self.note(f"held out after step {evaluation.step}: {evaluation.words}")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


QUEUED = frozenset(state.lower() for state in WAITING)


class _StepLines:
    """The replacement of a bar in a log: a line every 30 s."""

    def __init__(self, steps: int) -> None:
        self._steps, self._due = steps, time.monotonic() + LINE_S
        self._recent: deque[StepMetrics] = deque(maxlen=RECENT)

    def update(self, status: RankStatus | None, steps: Sequence[StepMetrics]) -> None:
        self._recent.extend(steps)
        if status is not None and status.phase in QUEUED:  # the steps belong to an ended attempt
            self._recent.clear()
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_S
            click.echo(f"{time.strftime('%H:%M:%S')} {self._words(status)}", err=True)

    def _words(self, status: RankStatus | None) -> str:
        if self._recent:
            last = self._recent[-1]
            left = statistics.median(step.step_time_s for step in self._recent) * (self._steps - last.step)
            eta = f", about {duration(left)} left" if left > 0 else ""
            return f"{_step_words(last, self._steps)}: {_figures(last)}{eta}"
        if status is None:
            return "no report yet"
        done = f", {data_size(status.done)} of {data_size(status.total)}" if status.total else ""
        return " ".join(filter(None, (status.phase, status.detail))) + done

    def print(self, text: str) -> None:
        click.echo(text, err=True)

    def stop(self) -> None:
        """Do nothing: a line needs no end."""


class _StepBar:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        columns = (TextColumn("{task.description}", markup=False), BarColumn(),
                   TextColumn("{task.fields[figures]}", markup=False), TimeRemainingColumn(compact=True))
        self._progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
        self._task: TaskID = self._progress.add_task("starting", total=None, figures="")
        self._training = False
        self._progress.start()
        self.stop = self._progress.stop

    def update(self, status: RankStatus | None, steps: Sequence[StepMetrics]) -> None:
        if steps:
            self._step(steps[-1])
        elif self._training and status is not None and status.phase in ("saving", "evaluating"):
            self._progress.update(self._task, description=status.phase)
        elif not self._training and status is not None:
            self._progress.update(self._task, description=status.phase, figures=status.detail,
                                  completed=status.done, total=status.total or None)
        self._progress.refresh()

    def _step(self, last: StepMetrics) -> None:
        if not self._training:  # from now on, the speed is that of steps
            self._training = True
            self._progress.reset(self._task, total=self._steps or None, completed=last.step)
        self._progress.update(self._task, completed=last.step, description=_step_words(last, self._steps), figures=_figures(last))

    def print(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)


def _step_words(step: StepMetrics, steps: int) -> str:
    """Return the step, with the total if known: a program's total is unknown."""
    return f"step {step.step}/{steps}" if steps else f"step {step.step}"


def _figures(step: StepMetrics) -> str:
    loss = f"loss {loss_number(step.loss)}" if math.isfinite(step.loss) else "no loss"
    return f"{loss}, {speed(step.tokens_per_s, step.mfu)}" if step.tokens_per_s else loss  # a program may count none
