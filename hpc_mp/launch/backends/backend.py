"""The one shape of all back ends: a plan in, the outcome of its run out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpc_mp.launch.listener import Listener
from hpc_mp.launch.plan import Plan, Target
from hpc_mp.launch.resume import Resumed
from hpc_mp.rundir.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Launch:
    """What a back end is given.

    Attributes:
        plans: one; several for an array, and only where the back end takes arrays.
        resumed: the run to go on with; None for a new one.
        wait: whether to wait for the end where the back end can leave a run alone.
        check: the last check, to be called before anything is written. It takes seconds and raises HpcMpError.
        listener: hears where the run lies and how it goes.
    """

    plans: tuple[Plan, ...]
    resumed: Resumed | None
    wait: bool
    check: Callable[[], None]
    listener: Listener

    @property
    def plan(self) -> Plan:
        return self.plans[0]


@dataclass(frozen=True, slots=True)
class Launcher:
    """A back end: how the ranks of a plan are started and followed.

    Attributes:
        target: what a plan must know of it.
        start: begins the run directory, starts the ranks, follows them to their end (or to the queue, without ``wait``) and
            says what became of them. It raises HpcMpError for what the user can mend and leaves nothing behind then.
        arrays: whether it starts all elements of ``slurm.array``; else the first one alone is given.
        named: whether ``--on`` takes its name; else ``auto`` alone chooses it.
    """

    target: Target
    start: Callable[[Launch], Outcome]
    arrays: bool = False
    named: bool = True
