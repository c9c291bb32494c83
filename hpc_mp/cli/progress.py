"""What a launch shows on a terminal: lines, and a bar while ranks train; in a pipe lines only."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hpc_mp.launch.listener import Listener
from hpc_mp.rundir.records import RankStatus, StepMetrics


class TerminalListener(Listener):
    """Prints to standard output, notes to standard error; on a terminal a bar shows the phase before the first step, then
    step, loss, tokens per second and the time that is left.

    Args:
        aside: print everything to standard error, for a document or a script has standard output.
    """

    def __init__(self, *, aside: bool) -> None:
        self._aside = aside
        self._bar: _StepBar | None = None
        self.interval = 0.25 if sys.stderr.isatty() else None

    def say(self, text: str) -> None:
        click.echo(text, err=self._aside)

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.print(text)
        else:
            click.echo(text, err=True)

    def begin(self, steps: int) -> None:
        if self.interval is not None:
            self._bar = _StepBar(steps)

    def update(self, status: RankStatus | None, steps: Sequence[StepMetrics]) -> None:
        if self._bar is not None:
            self._bar.update(status, steps)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


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
        if not self._training:  # from here on the speed is that of the steps
            self._training = True
            self._progress.reset(self._task, total=self._steps, completed=last.step)
        loss = f"loss {last.loss:.4f}" if math.isfinite(last.loss) else "no loss"
        self._progress.update(self._task, completed=last.step, description=f"step {last.step}/{self._steps}",
                              figures=f"{loss}  {last.tokens_per_s:,.0f} tokens/s")

    def print(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)
