"""A failed rank of a program: the others get a moment to report the reason of their own failure before they are ended.

srun would end them at once (``--kill-on-bad-exit=1``). But if one rank is stuck, the others fail: each gives up waiting, and
only all their messages together identify the stuck rank. So srun ends no rank; the supervisor does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from pathlib import Path

from hpc_mp.base.line_file import NewLines
from hpc_mp.diagnosis.lines import ends_step, task_ends

LINGER_S = 3.0  # gloo and NCCL notice a lost peer at once, and timeouts that began in one collective end together


class FailedStep:
    """Detector of the first failed rank.

    Args:
        log: srun's log.
        stop_requested: returns True if the ranks were asked to stop. Each rank then ends once it has saved.
        grace: seconds that they have to save.
        stop_codes: exit codes of ranks that have saved.
        begins: True if the step is started now: earlier lines of the log belong to earlier steps.
    """

    def __init__(self, log: Path, clock: Callable[[], float] = time.monotonic, stop_requested: Callable[[], bool] = lambda: False,
                 grace: float = LINGER_S, stop_codes: Collection[int] = (), begins: bool = True) -> None:
        self._lines, self._clock, self._since = NewLines(log), clock, math.inf
        self._stop_requested, self._grace, self._stop_codes, self._stops = stop_requested, grace, stop_codes, False
        if begins:
            self._lines.read()

    def due(self) -> bool:
        """Return True, once, if the other ranks must be ended now; never for a step that is already being ended."""
        for line in self._lines.read():
            if ends_step(line):
                self._since = -math.inf
            elif self._since == math.inf and (codes := {end.code for end in task_ends([line])} - {0}):
                self._since, self._stops = self._clock(), codes <= {*self._stop_codes}
        waited = self._clock() - self._since
        if waited < LINGER_S or self._since == -math.inf or (waited < self._grace and (self._stops or self._stop_requested())):
            return False
        self._since = -math.inf
        return True
