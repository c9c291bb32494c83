"""Tasks that do not end: srun has begun to end the step of a program, and a node does not tell that its tasks are gone.

A rank of our own engine writes down that it fails, and srun is then waited for no longer than it takes; of a program only srun
tells. It waits for ever for a node that has died, or was started anew before Slurm noticed that it was dead.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_mp.base.line_file import NewLines
from hpc_mp.cluster.slurm.records import Words
from hpc_mp.diagnosis.lines import ended_there, ends_step

KILL_WAIT_S = 30.0  # Slurm's default for the seconds between SIGTERM and SIGKILL
LAUNCHING = "launching StepId="  # of srun: the step begins on a host
MORE_S = 15.0  # in which a process that was killed is gone


class UnendedTasks:
    """Looks for nodes that do not tell of the ends of their tasks.

    Args:
        log: what srun says, with ``--verbose``.
        tasks: how many tasks each host has.
        settings: gives Slurm's own, once they are needed.
        begins: whether the step is started now: what stands in the log already is of earlier ones.

    Attributes:
        begun: whether srun has begun to end the step.
        seconds: for which was then waited.
        hosts: those that have not told; empty until then.
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
        """Return True if there are such nodes; it is asked again and again."""
        for line in self._lines.read():
            if LAUNCHING in line:
                self._ended, self.begun = {host: set() for host in self._tasks}, False
            if (found := ended_there(line)) is not None and found[0] in self._ended:
                self._ended[found[0]].update(found[1])
            if not self.begun and ends_step(line):
                self.begun, self._since, self.seconds = True, self._clock(), patience(self._settings())
        if self.begun and not self.hosts and self._clock() - self._since > self.seconds:
            self.hosts = tuple(host for host, ended in self._ended.items() if len(ended) < self._tasks[host])
        return bool(self.hosts)


def patience(settings: Words) -> float:
    """Seconds in which all tasks of a step have ended since srun began to end it."""
    said = re.match(r"\d+", settings.get("KillWait", ""))
    return (float(said[0]) if said else KILL_WAIT_S) + MORE_S
