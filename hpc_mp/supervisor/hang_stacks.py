"""Before ranks that hang are ended: the stack of each of them, and whom the others wait for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpc_mp.cluster.slurm.steps import one_task_per_node
from hpc_mp.cluster.slurm.variables import one_task_environment
from hpc_mp.diagnosis.evidence import Hang
from hpc_mp.diagnosis.stacks import aborted, numbers, read_stacks, sentence_of, standing_apart
from hpc_mp.program.stacks import record_stacks
from hpc_mp.rundir import RunDirectory
from hpc_mp.supervisor.context import AttemptContext
from hpc_mp.supervisor.srun import StepCommand, follow

MODULE = "hpc_mp.program.stacks"
MEET_S = 8.0  # until all nodes have been asked: then ranks of which nothing is known get SIGABRT, on all nodes at once
AT_MOST_S = 20.0  # for the step: a node that is gone does not answer, and must not keep the verdict waiting


def record_on_all_nodes(attempt: AttemptContext) -> None:
    """Start a step that writes down where every rank stands, and ends those that only tell as they die."""
    words = [sys.executable, "-P", "-m", MODULE, str(attempt.run.path), str(attempt.record.attempt), str(time.time() + MEET_S)]
    argv = one_task_per_node(attempt.command, attempt.spec.job.nodes, words)
    if argv is None:  # mpirun's ranks, of which only those on this host can be seen
        record_stacks(attempt.run, attempt.record.attempt)
    else:
        follow(StepCommand(argv, one_task_environment(attempt.environ), attempt.run.srun_log), None, at_most=AT_MOST_S)


def add_what_logs_say(run: RunDirectory, lines: Callable[[int], Sequence[str]]) -> None:
    """Move stacks that SIGABRT has made ranks write into their logs to the files where stacks are looked for.

    Args:
        lines: the last ones of a rank's log.
    """
    for stack in read_stacks(run):
        said = aborted(lines(stack.rank)) if not stack.frames else ()
        if said:
            head = f"rank {stack.rank}, pid {stack.pid}, {stack.state}: what SIGABRT has made it write"
            with open(run.rank_stack(stack.rank), "a", encoding="utf-8") as file:
                file.write("\n".join((head, *said, "")))


def explained(hang: Hang, run: RunDirectory) -> Hang:
    """The hang with what the stacks say of it."""
    stacks = read_stacks(run)
    apart = standing_apart(stacks, hang.first)
    rank = apart if apart is not None else hang.rank
    return replace(hang, rank=rank, stands=sentence_of(stacks, rank))


def where(run: RunDirectory) -> str:
    """For the log: where the stacks lie."""
    ranks = [stack.rank for stack in read_stacks(run)]
    name = f"{run.rank_stack.pattern.partition('{')[0]}*"
    return f"where {numbers(ranks)} stood: {name}" if ranks else "no stacks of its ranks could be had"
