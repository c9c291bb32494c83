"""Who is notified of what a launch does: a terminal, a notebook, or nobody. A launch itself prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hpc_mp.rundir.records import Evaluation, RankStatus, StepMetrics


class Listener:
    """Ignores everything; a subclass overrides the methods whose news it wants.

    Attributes:
        interval: seconds between two calls of ``update`` while ranks run; None: only when something happens.
    """

    interval: float | None = None

    def say(self, text: str) -> None:
        """Called with what is decided and done, a line or several lines at a time."""

    def note(self, text: str) -> None:
        """Called with what a user must read at once: a warning, why a job waits, what an interrupt does."""

    def begin(self, steps: int) -> None:
        """Called before the ranks of a run with so many optimizer steps are followed."""

    def update(self, status: RankStatus | None, steps: Sequence[StepMetrics]) -> None:
        """Called while they are followed: ``status`` is what rank 0 is doing (None: nothing yet), ``steps`` are those that
        have ended since the last call."""

    def evaluated(self, found: Sequence[Evaluation]) -> None:
        """Called while they are followed, with the evaluations on held-out text since the last call."""

    def end(self) -> None:
        """Called when they are no longer followed, however that came."""

    @contextmanager
    def following(self, steps: int) -> Iterator[None]:
        """``begin`` … ``end`` around a block."""
        self.begin(steps)
        try:
            yield
        finally:
            self.end()


class Teller(Listener):
    """Passes all text to one function, ``print`` for instance."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say

    def say(self, text: str) -> None:
        self._say(text)

    note = say
