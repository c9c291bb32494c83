"""A rank of a program has failed: the others have a moment to say what they lack before they are ended.

srun would end them at once (``--kill-on-bad-exit=1``). But where one rank is stuck, the others are who fail: each of them gives
up waiting, and only all their complaints together tell for whom. So srun is told to end nobody, and the supervisor does it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from hpc_mp.base.line_file import NewLines
from hpc_mp.supervisor.log_patterns import ends_step, task_ends

LINGER_S = 3.0  # gloo and NCCL notice a lost peer in a moment, and time-outs that began in one collective end together


class FailedStep:
    """Looks for the first rank that fails.

    Args:
        log: what srun says.
        begins: whether the step is started now: what stands there already is of earlier ones.
    """

    def __init__(self, log: Path, clock: Callable[[], float] = time.monotonic, begins: bool = True) -> None:
        self._lines, self._clock, self._since = NewLines(log), clock, math.inf
        if begins:
            self._lines.read()

    def due(self) -> bool:
        """Whether the others are to be ended now; said once, and not of a step that is being ended already."""
        for line in self._lines.read():
            if ends_step(line):
                self._since = -math.inf
            elif self._since == math.inf and any(end.code != 0 for end in task_ends([line])):
                self._since = self._clock()
        if self._clock() - self._since < LINGER_S or self._since == -math.inf:
            return False
        self._since = -math.inf
        return True
