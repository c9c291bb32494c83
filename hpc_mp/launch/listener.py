"""Listeners to the progress of a launch: a terminal, a notebook, or none. A launch itself prints nothing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hpc_mp.rundir.records import Evaluation, RankStatus, StepMetrics


class Listener:
    """A listener that ignores everything; a subclass overrides the methods that it needs. ``interval``: seconds between two calls
    of ``update`` while ranks run; None: only at events."""

    interval: float | None = None

    def say(self, text: str) -> None:
        """Receive a decision or an action, as one or several lines."""

    def note(self, text: str) -> None:
        """Receive a text that a user must read at once: a warning, why a job waits, the effect of an interrupt."""

    def begin(self, steps: int) -> None:
        """Called before the ranks of a run with ``steps`` optimizer steps are followed."""

    def update(self, status: RankStatus | None, steps: Sequence[StepMetrics]) -> None:
        """Called while ranks are followed. ``status``: rank 0's activity (None: not yet known); ``steps``: newly ended steps."""

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        """Called while ranks are followed, with the evaluations on held-out text since the last call."""

    def end(self) -> None:
        """Called when ranks are no longer followed, for whatever reason."""

    @contextmanager
    def following(self, steps: int) -> Iterator[None]:
        """Call ``begin`` before a block and ``end`` after it."""
        self.begin(steps)
        try:
            yield
        finally:
            self.end()


class Teller(Listener):
    """A listener that passes all text to one function, such as ``print``."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say

    def say(self, text: str) -> None:
        self._say(text)

    note = say
