"""The one shape of all back ends: a plan in, the outcome of its run out; a Python callable in, its tasks out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpc_mp.job import AnySpec
from hpc_mp.launch.depends import Dependencies
from hpc_mp.launch.listener import Listener
from hpc_mp.launch.model_check import ModelChecker
from hpc_mp.launch.plan import JobPlan, Target
from hpc_mp.launch.resume import Resumed
from hpc_mp.launch.submit.worker import SubmittedCall
from hpc_mp.report.conclude import conclude
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.outcome import Cause, Outcome, State, figures, verdict


@dataclass(frozen=True, slots=True)
class Launch:
    """What a back end is given.

    Attributes:
        plans: one; several for a sweep, and only where the back end takes arrays.
        resumed: the run to go on with; None for a new one.
        wait: whether to wait for the end where the back end can leave a run alone.
        check: the last check, to be called before anything is written, with what asks transformers: ``check_model``, or another
            that has it called elsewhere. It takes seconds and raises HpcMpError.
        listener: is notified of where the run lies and how it goes.
    """

    plans: tuple[JobPlan, ...]
    resumed: Resumed | None
    wait: bool
    check: Callable[[ModelChecker], None]
    listener: Listener

    @property
    def plan(self) -> JobPlan:
        return self.plans[0]


def concluded(
    launch: Launch, attempt: AttemptReader, job_id: str | None, guess: Callable[[], tuple[State, Cause | None]],
) -> Outcome:
    """The outcome of a run that has ended: the supervisor's verdict; without one what ``guess`` says becomes the verdict."""
    run = attempt.run
    found, numbers = verdict(run), figures(run, attempt.number)
    if found is not None:
        return Outcome(run.path, found.state, job_id, cause=found.cause, report=found.report, **numbers)
    state, cause = guess()
    return conclude(Outcome(run.path, state, job_id, cause=cause, **numbers), run.attempt(), launch.listener.note)


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A Python callable that ``nodes * tasks_per_node`` tasks are to run.

    Attributes:
        folder: gets the pickles, the script and the logs; all nodes see it.
        options: of ``submitit.SlurmExecutor``.
    """

    call: SubmittedCall
    folder: Path
    nodes: int
    tasks_per_node: int
    options: Mapping[str, Any]


class SubmittedTasks(Protocol):
    """The tasks that run a callable."""

    id: str
    words: str

    def state(self) -> str:
        """In Slurm's words."""

    def why(self) -> str:
        """How it ended, for a failure of which no task has said anything."""

    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Launcher:
    """A back end: how the ranks of a plan are started and followed.

    Attributes:
        target: what a plan must know of it.
        start: begins the run directory, starts the ranks, follows them to their end (or to the queue, without ``wait``) and
            says what became of them. It raises HpcMpError for what the user can mend and leaves nothing behind then.
        arrays: whether it starts all runs of a sweep at once; else it is given one after the other.
        depends: what ``slurm.depends`` means there; raises HpcMpError. None where it has no effect.
        named: whether ``--on`` takes its name; else ``auto`` alone chooses it.
        rehearse: lets the scheduler look at the script of plans, for these runs, before anything is written; gives the plans that
            it takes, and its words; raises HpcMpError where it refuses. None where no script is handed in.
        submit: starts the tasks of a Python callable (``hpc_mp.submit``); None where that is not built.
    """

    target: Target
    start: Callable[[Launch], Outcome]
    arrays: bool = False
    depends: Callable[[AnySpec], Dependencies] | None = None
    named: bool = True
    rehearse: Callable[[tuple[JobPlan, ...], Sequence[Path]], tuple[tuple[JobPlan, ...], str]] | None = None
    submit: Callable[[CallRequest], SubmittedTasks] | None = None
