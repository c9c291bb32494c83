"""What a user sees while a run goes on: a bar on a terminal, nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress(AbstractContextManager["Progress"], Protocol):
    """Is told what is new; ``interval`` says how often, in seconds (None: only when something ends)."""

    interval: float | None

    def update(self, status: dict[str, Any] | None, steps: Sequence[dict[str, Any]]) -> None:
        """``status`` as in status.json (None: nothing yet), ``steps`` the metrics that are new."""

    def note(self, text: str) -> None:
        """Something that the user must read."""


class Quiet(Progress):
    """For a pipe."""

    interval = None

    def update(self, status: dict[str, Any] | None, steps: Sequence[dict[str, Any]]) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        pass


class Bar(Progress):
    """For a terminal: the phase before the first step, then step, loss, tokens per second and the time that is left."""

    interval = 0.25

    def __init__(self, steps: int) -> None:
        self._steps = steps
        columns = (TextColumn("{task.description}", markup=False), BarColumn(),
                   TextColumn("{task.fields[figures]}", markup=False), TimeRemainingColumn(compact=True))
        self._bars = Bars(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
        self._task = self._bars.add_task("starting", total=None, figures="")
        self._training = False

    def update(self, status: dict[str, Any] | None, steps: Sequence[dict[str, Any]]) -> None:
        if steps:
            self._step(steps[-1])
        elif self._training and status is not None and status["phase"] == "saving":
            self._bars.update(self._task, description="saving")
        elif not self._training and status is not None:
            self._bars.update(self._task, description=status["phase"], figures=status["detail"],
                              completed=status["done"], total=status["total"] or None)
        self._bars.refresh()

    def _step(self, last: dict[str, Any]) -> None:
        if not self._training:  # from here on the speed is that of the steps
            self._training = True
            self._bars.reset(self._task, total=self._steps, completed=last["step"])
        self._bars.update(self._task, completed=last["step"], description=f"step {last['step']}/{self._steps}",
                          figures=f"loss {last['loss']:.4f}  {last['tokens_per_s']:,.0f} tokens/s")

    def note(self, text: str) -> None:
        self._bars.console.print(text, highlight=False)

    def __enter__(self) -> Bar:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


def progress_for(steps: int) -> Progress:
    """A bar when standard error is a terminal. ``steps``: of the whole run."""
    return Bar(steps) if sys.stderr.isatty() else Quiet()
