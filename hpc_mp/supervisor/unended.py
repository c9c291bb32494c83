"""The end of a program's step, followed in srun's log: its first failed rank, and nodes that do not report the end of tasks.

A rank of our own engine records its failure, and srun then has a limited time to end. A program's end is reported only by srun.
It waits forever for a node that has died, or that rebooted before Slurm noticed its death.

srun would end the other ranks at once (``--kill-on-bad-exit=1``). But if one rank is stuck, the others fail: each gives up
waiting, and only all their messages together identify the stuck rank. So srun ends no rank; the supervisor does, a moment later.
"""

import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from hpc_mp.base.line_file import NewLines
from hpc_mp.cluster.slurm.records import Words
from hpc_mp.diagnosis.lines import ended_there, ends_step, task_ends

KILL_WAIT_S = 30.0  # Slurm's default for the seconds between SIGTERM and SIGKILL
LAUNCHING = "launching StepId="  # srun's message: the step begins on a host
MORE_S = 15.0  # in which a killed process is gone
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


class UnendedTasks:
    """Detector of nodes that do not report the ends of their tasks.

    Args:
        log: srun's log, with ``--verbose``.
        tasks: number of tasks of each host.
        settings: returns Slurm's settings; called when they are needed.
        begins: True if the step is started now: earlier lines of the log belong to earlier steps.

    Attributes:
        begun: True if srun has begun to end the step.
        seconds: patience after that.
        hosts: hosts that have not reported; empty until then.
    """

    def __init__(self, log: Path, tasks: Mapping[str, int], settings: Callable[[], Words],
                 clock: Callable[[], float] = time.monotonic, begins: bool = True) -> None:
        self._lines, self._settings, self._clock = NewLines(log), settings, clock
        if begins:
            self._lines.read()
        self._tasks = tasks
        self._ended: dict[str, set[int]] = {host: set() for host in tasks}
        self._since = clock()
        self.begun = False
        self.seconds = 0.0
        self.hosts: tuple[str, ...] = ()

    def noticed(self) -> bool:
        """Return True if a node does not report. To be called repeatedly."""
        self._read()
        if self.begun and not self.hosts and self._clock() - self._since > self.seconds:
            self.hosts = self._silent()
        return bool(self.hosts)

    def conclude(self) -> None:
        """Name the hosts that have not reported by srun's end, unless no host has: srun gives up a node after ``KillWait``."""
        self._read()
        if len(silent := self._silent()) < len(self._tasks):
            self.hosts = silent

    def _silent(self) -> tuple[str, ...]:
        return tuple(host for host, ended in self._ended.items() if len(ended) < self._tasks[host])

    def _read(self) -> None:
        for line in self._lines.read():
            if LAUNCHING in line:
                self._ended, self.begun = {host: set() for host in self._tasks}, False
            if (end := ended_there(line)) is not None and end[0] in self._ended:
                self._ended[end[0]].update(end[1])
            if not self.begun and ends_step(line):
                self.begun, self._since, self.seconds = True, self._clock(), patience(self._settings())


def patience(settings: Words) -> float:
    """Return the seconds in which all tasks of a step end after srun has begun to end it."""
    match = re.match(r"\d+", settings.get("KillWait", ""))
    return (float(match[0]) if match else KILL_WAIT_S) + MORE_S
