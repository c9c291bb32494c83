"""The interface of all back ends: a plan in, the outcome of its run out; a Python callable in, its tasks out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpc_mp.job import AnySpec
from hpc_mp.launch.depends import Dependencies
from hpc_mp.launch.listener import Listener
from hpc_mp.launch.model_check import ModelChecker
from hpc_mp.launch.plan import JobPlan, Target
from hpc_mp.launch.render import JobScript
from hpc_mp.launch.resume import Resumed
from hpc_mp.launch.submit.worker import SubmittedCall
from hpc_mp.report.conclude import conclude
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.outcome import Cause, Outcome, State, figures, verdict


@dataclass(frozen=True, slots=True)
class Launch:
    """The input of a back end.

    Attributes:
        plans: one plan; several for a sweep, if the back end takes arrays.
        resumed: the run to resume; None for a new run.
        wait: True to wait for the end, if the back end can leave a run unattended.
        check: the last check, called before anything is written, with the function that asks transformers: ``check_model``, or
            one that runs it in another process. It takes seconds and raises HpcMpError.
        listener: receives the location and the progress of the run.
    """

    plans: tuple[JobPlan, ...]
    resumed: Resumed | None
    wait: bool
    check: Callable[[ModelChecker], None]
    listener: Listener

    @property
    def plan(self) -> JobPlan:
        return self.plans[0]


def concluded(launch: Launch, attempt: AttemptReader, job_id: str | None,
              guess: Callable[[], tuple[State, Cause | None]]) -> Outcome:
    """Return the outcome of a run that has ended: the supervisor's verdict; without one the result of ``guess``."""
    run = attempt.run
    conclusion, numbers = verdict(run), figures(run, attempt.number)
    if conclusion is not None:
        return Outcome(run.path, conclusion.state, job_id, cause=conclusion.cause, report=conclusion.report, **numbers)
    state, cause = guess()
    return conclude(Outcome(run.path, state, job_id, cause=cause, **numbers), run.attempt(), launch.listener.note)


@dataclass(frozen=True, slots=True)
class RehearsedPlans:
    """A scheduler's test of a script: the plans that it accepts, their script, and its message as rows of the summary."""

    plans: tuple[JobPlan, ...]
    script: JobScript
    message: str


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A Python callable for ``nodes * tasks_per_node`` tasks to run. ``folder``: directory of the pickles, the script and the
    logs; all nodes see it. ``options``: options of ``submitit.SlurmExecutor``."""

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
        """Return the state in Slurm's words."""

    def why(self) -> str:
        """Return how it ended, for a failure that no task has reported."""

    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BackEnd:
    """A back end: it starts and follows the ranks of a plan.

    Attributes:
        target: the facts about it that a plan needs.
        start: creates the run directory, starts the ranks, follows them to their end (or into the queue, without ``wait``) and
            returns the outcome. Raises HpcMpError for problems that the user can fix, and then leaves nothing behind.
        arrays: True if it starts all runs of a sweep at once; else they are passed one after the other.
        depends: resolves ``slurm.depends``; raises HpcMpError. None if the key has no effect there.
        named: True if ``--on`` accepts its name; else only ``auto`` selects it.
        rehearse: has the scheduler test the script of plans, for these runs, before anything is written; raises HpcMpError if it
            refuses. None if no script is submitted.
        submit: starts the tasks of a Python callable (``hpc_mp.submit``); None if not implemented.
    """

    target: Target
    start: Callable[[Launch], Outcome]
    arrays: bool = False
    depends: Callable[[AnySpec], Dependencies] | None = None
    named: bool = True
    rehearse: Callable[[tuple[JobPlan, ...], Sequence[Path]], RehearsedPlans] | None = None
    submit: Callable[[CallRequest], SubmittedTasks] | None = None
