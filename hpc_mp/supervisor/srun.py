"""Start of the ranks, and the watch over them to their end."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpc_mp.base.command import CommandFailed
from hpc_mp.base.dead_children import DeadChildren
from hpc_mp.base.errors import RunFailed
from hpc_mp.cluster.slurm.steps import has_numbered_steps
from hpc_mp.cluster.slurm.submit import cancel
from hpc_mp.supervisor.signals import RunningStep, Signals

POLL_S = 0.5  # seconds between two polls
LAG_S = 15.0  # seconds after a rank's failure in which srun must end: a lost node never answers it
BLIND_S = 10.0  # seconds in which mpirun must notice that all its ranks have ended
ASKING = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
FORCE_S = ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))  # signals for srun then, and seconds to obey


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of a step. ``code``: as from ``subprocess``; ``forced``: srun did not end by itself after a rank had failed;
    ``blind``: mpirun did not notice that all ranks had ended, and was ended."""

    code: int
    forced: bool
    blind: bool = False

    @property
    def died(self) -> bool:
        """True if srun was killed by a signal other than a request to stop, which it handles."""
        return self.code < 0 and not (self.forced or self.blind or -self.code in ASKING)


class Orphan:
    """An srun whose parent was killed: its exit code is lost, and 0 is used instead."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self.pid, self.returncode = process, process.pid, 0
        self.argv = process.cmdline()

    def poll(self) -> int | None:
        with suppress(psutil.Error):
            return None if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE else 0
        return 0

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("srun", timeout)
            time.sleep(POLL_S / 5)
        return 0

    def send_signal(self, number: int, /) -> None:
        with suppress(psutil.Error):
            self._process.send_signal(number)


def follow(argv: Sequence[str], environ: Mapping[str, str], log: Path, signals: Signals | None,
           failed: Callable[[], bool] = lambda: False, at_most: float = math.inf, mpirun: bool = False) -> StepEnd:
    """Run srun to its end.

    Args:
        log: gets srun's output, which names dead nodes and tasks.
        signals: signals to forward to it; None if it must not be interrupted.
        failed: returns True if a rank has recorded a failure.
        at_most: maximum number of seconds.
        mpirun: True if mpirun is the ranks' parent and must notice their ends.
    """
    with open(log, "ab") as output:
        step = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    return follow_step(step, signals, failed, at_most, mpirun)


def follow_step(step: RunningStep, signals: Signals | None, failed: Callable[[], bool] = lambda: False, at_most: float = math.inf,
                mpirun: bool = False) -> StepEnd:
    """Follow a step that is already running, like ``follow``."""
    since = time.monotonic() + at_most - LAG_S
    children = DeadChildren(step.pid, BLIND_S if mpirun else math.inf)
    while step.poll() is None:
        if signals is not None:
            signals.pass_on(step)
        if since > time.monotonic() and failed():
            since = time.monotonic()
        if children.noticed():
            return StepEnd(_force(step), False, blind=True)
        if time.monotonic() - since > LAG_S:
            return StepEnd(_force(step), True)
        with suppress(subprocess.TimeoutExpired):  # a short step's end is noticed at once
            step.wait(POLL_S)
    return StepEnd(step.returncode, False)


def orphans(variable: str, value: str) -> list[Orphan]:
    """Return srun processes, with this environment variable, that a supervisor has left behind on this host."""
    abandoned = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # processes that have ended or belong to others; srun has a child of the same name
            if (process.name() == "srun" and process.environ().get(variable) == value
                    and os.getsid(process.pid) == process.pid):
                abandoned.append(Orphan(process))
    return abandoned


def _force(step: RunningStep) -> int:
    for number, seconds in FORCE_S:
        step.send_signal(number)
        try:
            return step.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    return -signal.SIGKILL


def end_steps(job_id: str, grace: float) -> None:
    """Ask ranks without srun to end, and wait until they have saved. A helper of srun ends the step, unless it was killed too."""
    with suppress(CommandFailed, RunFailed):
        cancel(job_id, "TERM")
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and has_numbered_steps(job_id):
            time.sleep(POLL_S)
