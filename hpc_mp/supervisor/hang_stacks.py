"""Recording of stacks before hung ranks are ended: each rank's stack, and the rank that the others wait for."""

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
from hpc_mp.supervisor.srun import follow

MODULE = "hpc_mp.program.stacks"
MEET_S = 8.0  # until all nodes have been queried: ranks without a known stack then get SIGABRT, on all nodes at once
AT_MOST_S = 20.0  # for the step: a lost node does not answer, and must not delay the verdict


def record_on_all_nodes(attempt: AttemptContext) -> None:
    """Start a step that records the stacks of all ranks, and ends the ranks that write them only as they die."""
    words = [sys.executable, "-P", "-m", MODULE, str(attempt.run.path), str(attempt.record.attempt), str(time.time() + MEET_S)]
    argv = one_task_per_node(attempt.command, attempt.spec.job.nodes, words)
    if argv is None:  # mpirun's ranks: only those on this host are visible
        record_stacks(attempt.run, attempt.record.attempt)
    else:
        follow(argv, one_task_environment(attempt.environ), attempt.run.srun_log, None, at_most=AT_MOST_S)


def add_what_logs_say(run: RunDirectory, lines: Callable[[int], Sequence[str]]) -> None:
    """Copy stacks that ranks wrote to their logs at SIGABRT to the stack files. ``lines``: returns the last lines of a rank's
    log."""
    for stack in read_stacks(run):
        output = aborted(lines(stack.rank)) if not stack.frames else ()
        if output:
            head = f"rank {stack.rank}, pid {stack.pid}, {stack.state}: output at SIGABRT"
            with open(run.rank_stack(stack.rank), "a", encoding="utf-8") as file:
                file.write("\n".join((head, *output, "")))


def explained(hang: Hang, run: RunDirectory) -> Hang:
    """Return the hang with the findings from the stacks."""
    stacks = read_stacks(run)
    apart = standing_apart(stacks, hang.first)
    rank = apart if apart is not None else hang.rank
    return replace(hang, rank=rank, stands=sentence_of(stacks, rank))


def where(run: RunDirectory) -> str:
    """Return the location of the stacks, for the log."""
    ranks = [stack.rank for stack in read_stacks(run)]
    name = f"{run.rank_stack.pattern.partition('{')[0]}*"
    return f"stacks of {numbers(ranks)}: {name}" if ranks else "no stacks of its ranks were recorded"
