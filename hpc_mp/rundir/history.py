"""What became of each attempt of a run: ``RUN/history.jsonl``, one line per attempt that has ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile

from hpc_mp.job import AnySpec, ProgramSpec
from hpc_mp.rundir import RunDirectory, problem, read_lines
from hpc_mp.rundir.checkpoints import complete_steps, step_of
from hpc_mp.rundir.records import Evaluation, StepMetrics, last_records, read_records


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How one attempt ended.

    Attributes:
        step: of the newest checkpoint then; of a program the latest that it has ever said (``hpc_mp.log``), 0 where it says none.
        kind: "completed", "stopped", or a key of ``failures.KINDS``.
        nodes: to blame.
        action: what was done about it: "done", "requeue", "wait" (a successor goes on) or "fail"; "resume": no end, but
            somebody who wants the run to go on, and has mended what was to mend.
        time: unix seconds.
        rank, node: of the failure; None when it was no rank, or no node.
        returned: nodes of it that an earlier attempt had blamed and that had come back since: a failure that does not count.
        departed: why the job had to go, where Slurm wanted that: such a stop says nothing of the run.
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
        """Whether it is a failure that ``slurm.retries`` counts."""
        return self.kind != "stopped" and not self.returned


def history(run: RunDirectory) -> list[AttemptEnd]:
    """All ends, the earliest first."""
    return [AttemptEnd(**{**line, "nodes": tuple(line["nodes"]), "returned": tuple(line.get("returned", ()))})
            for line in read_lines(run.history)]


def known_history(run: RunDirectory) -> list[AttemptEnd]:
    """The same; a file that is broken or cannot be read tells nothing."""
    try:
        return history(run)
    except (OSError, KeyError, TypeError):
        return []


def record(run: RunDirectory, end: AttemptEnd) -> None:
    """Raises OSError when it cannot be written."""
    with open(run.history, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(end)) + "\n")


def saved_step(run: RunDirectory) -> int:
    """The step of the newest checkpoint; 0 without any."""
    saved = complete_steps(run.checkpoints)
    return step_of(saved[-1]) if saved else 0


def furthest_step(run: RunDirectory, spec: AnySpec) -> int:
    """How far the run has come: the step of its newest checkpoint, or the latest that its program has ever said."""
    if not isinstance(spec, ProgramSpec):
        return saved_step(run)
    said = last_records(run.metrics, StepMetrics, 1)  # of this attempt: a later one cuts off what it does again
    return max([end.step for end in history(run)] + [record.step for record in said], default=0)


def without_progress(ends: list[AttemptEnd], step: int) -> list[AttemptEnd]:
    """The latest ends since which the run has come no further than ``step`` and nobody has resumed it."""
    return list(takewhile(lambda end: end.step == step and end.action != "resume", reversed(ends)))


def returned(ends: Sequence[AttemptEnd], hosts: Sequence[str]) -> tuple[str, ...]:
    """Those ``hosts`` that an earlier attempt has blamed. What fails there may still be the old fault: a node that comes back
    has remnants to clear, or goes again. Each blame excuses one end, so that a node that fails for ever still ends the run.
    """
    doubtful: set[str] = set()
    for end in ends:
        doubtful = doubtful - {*end.returned} if end.returned else doubtful | {*end.nodes}
    return tuple(host for host in hosts if host in doubtful)


def complete(run: RunDirectory, spec: AnySpec) -> bool:
    """Whether the run has a sound checkpoint of its last step and, where the job evaluates, the evaluation after it; of a
    program, whether its last attempt has ended well."""
    if isinstance(spec, ProgramSpec):
        return any(end.kind == "completed" for end in history(run)[-1:])
    saved = complete_steps(run.checkpoints)
    if not saved or saved_step(run) != spec.train.steps or problem(saved[-1]) is not None:
        return False
    return not spec.evaluate.files or spec.train.steps in {each.step for each in read_records(run.evaluations, Evaluation)}
