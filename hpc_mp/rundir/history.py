"""The outcome of each attempt of a run: ``RUN/history.jsonl``, one line per attempt that has ended."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile

from hpc_mp.job import AnySpec, ProgramSpec
from hpc_mp.rundir import RunDirectory, problem, read_lines
from hpc_mp.rundir.checkpoints import complete_steps, step_of
from hpc_mp.rundir.records import Evaluation, StepMetrics, last_records, read_records
from hpc_mp.rundir.retention import exhausted


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """The end of one attempt.

    Attributes:
        step: step of the newest checkpoint at that time; for a program the latest step that it ever reported (``hpc_mp.log``),
            0 without one.
        kind: "completed", "stopped", or a key of ``failures.KINDS``.
        nodes: nodes to blame.
        action: the action that followed: "done", "requeue", "wait" (a successor continues) or "fail"; "resume" is not an end:
            the user resumed the run and has presumably fixed the failure.
        time: unix seconds.
        rank, node: rank and node of the failure; None if it was not a rank's or not a node's.
        returned: its nodes that an earlier attempt had blamed and that had since come back: the failure then does not count.
        departed: the reason for which Slurm wanted the job to leave: the stop is then not due to the run. Empty without one.
    """

    token: str
    attempt: int
    step: int
    kind: str
    message: str
    nodes: tuple[str, ...]
    action: str
    time: float
    rank: int | None = None
    node: str | None = None
    returned: tuple[str, ...] = ()
    departed: str = ""

    @property
    def counts(self) -> bool:
        """True if it is a failure that ``slurm.retries`` counts."""
        return self.kind != "stopped" and not self.returned


def history(run: RunDirectory) -> list[AttemptEnd]:
    """Return all ends, the earliest first. Raises OSError, KeyError or TypeError for an unreadable or broken file."""
    return [AttemptEnd(**{**line, "nodes": tuple(line["nodes"]), "returned": tuple(line.get("returned", ()))})
            for line in read_lines(run.history)]


def known_history(run: RunDirectory) -> list[AttemptEnd]:
    """Return all ends, the earliest first; empty if the file is broken or cannot be read."""
    try:
        return history(run)
    except (OSError, KeyError, TypeError):
        return []


def record(run: RunDirectory, end: AttemptEnd) -> None:
    """Append an end. Raises OSError if it cannot be written."""
    with open(run.history, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(end)) + "\n")


def saved_step(run: RunDirectory) -> int:
    """Return the step of the newest checkpoint; 0 without one."""
    saved = complete_steps(run.checkpoints)
    return step_of(saved[-1]) if saved else 0


def furthest_step(run: RunDirectory, spec: AnySpec) -> int:
    """Return the run's progress: the step of its newest checkpoint, or the latest step that its program ever reported."""
    if not isinstance(spec, ProgramSpec):
        return saved_step(run)
    records = last_records(run.metrics, StepMetrics, 1)  # of this attempt: a later one removes the steps that it repeats
    return max([end.step for end in history(run)] + [record.step for record in records], default=0)


def without_progress(ends: list[AttemptEnd], step: int) -> list[AttemptEnd]:
    """Return the latest ends since which the run has not progressed past ``step`` and has not been resumed by the user."""
    return list(takewhile(lambda end: end.step == step and end.action != "resume", reversed(ends)))


def returned(ends: Sequence[AttemptEnd], hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the ``hosts`` that an earlier attempt has blamed. A failure there may still be the old fault: a node that comes back
    has remnants to clear, or fails again. Each blame excuses one end, so that a node that fails repeatedly still ends the run."""
    doubtful: set[str] = set()
    for end in ends:
        doubtful = doubtful - {*end.returned} if end.returned else doubtful | {*end.nodes}
    return tuple(host for host in hosts if host in doubtful)


def complete(run: RunDirectory, spec: AnySpec) -> bool:
    """Return True if the run has a sound checkpoint of its last step and, if the job evaluates, the evaluation after that step.
    A step at which ``evaluate.patience`` is exhausted is the last one. For a program, return True if its last attempt has
    succeeded."""
    if isinstance(spec, ProgramSpec):
        return any(end.kind == "completed" for end in history(run)[-1:])
    saved, last = complete_steps(run.checkpoints), saved_step(run)
    if not saved or problem(saved[-1]) is not None:
        return False
    evaluations = [evaluation for evaluation in read_records(run.evaluations, Evaluation) if evaluation.step <= last]
    rule = spec.evaluate
    if evaluations and evaluations[-1].step == last and exhausted(evaluations, rule.patience, rule.gain, rule.best):
        return True
    return last == spec.train.steps and (not spec.evaluate.active or last in {evaluation.step for evaluation in evaluations})
