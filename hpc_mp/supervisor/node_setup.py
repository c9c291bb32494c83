"""Short steps before and after the ranks: one task per node, in plain bash.

Before: check that the run directory is visible, create the node's own directory, and stage files. After: if ranks failed, keep
the files that libraries left on the node; remove the node's own directory.
"""

from __future__ import annotations

import sys

from hpc_mp.base.assets import asset
from hpc_mp.base.line_file import NewLines
from hpc_mp.cluster.slurm.steps import failed_nodes, one_task_per_node, use_up_numbers
from hpc_mp.cluster.slurm.variables import one_task_environment
from hpc_mp.job import AnySpec, JobSpec, ProgramSpec
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.history import saved_step
from hpc_mp.rundir.records import StagedEnvironment, read_record
from hpc_mp.supervisor.context import AttemptContext
from hpc_mp.supervisor.signals import Signals
from hpc_mp.supervisor.srun import StepCommand, follow

END_S = 60.0  # a node that cannot be cleaned up must not delay the others


def start(attempt: AttemptContext, signals: Signals) -> int:
    """Prepare every node. Return the step's exit code, or 0 if srun does not start the ranks."""
    if attempt.allocation is not None and attempt.allocation.restart:
        use_up_numbers(attempt.command, one_task_environment(attempt.environ), attempt.allocation.restart)
    step = _step(attempt, "slurm/node-start.sh", *_start_arguments(attempt.run, attempt.spec))
    return follow(step, signals).code if step else 0


def end(attempt: AttemptContext, failed: bool) -> tuple[str, ...] | None:
    """Keep evidence of a failure, and clean up; lost nodes are ignored.

    Returns the nodes that srun could not reach; None if srun did not end in time and they are unknown.
    """
    step = _step(attempt, "slurm/node-end.sh", "failed" if failed else "done")
    if step is None:
        return ()
    new_lines = NewLines(step.log)
    new_lines.read()  # of earlier steps
    return None if follow(step, None, at_most=END_S).forced else tuple(failed_nodes(new_lines.read()))


def _start_arguments(run: RunDirectory, spec: AnySpec) -> list[str]:
    """Return the arguments of ``node-start.sh``: checks, and files to stage."""
    arguments = ["--health", sys.executable] if spec.environment.health else []
    by_script = isinstance(spec, ProgramSpec) and spec.by_script  # it may ask for a part of a GPU, or for none
    arguments += ["--gpus"] if spec.job.device == "cuda" and not by_script else []
    if spec.environment.stage:
        packed = read_record(run.environment, StagedEnvironment)
        arguments += ["--environment", packed.archive, packed.prefix]
    model = spec.model if isinstance(spec, JobSpec) else None
    if model is not None and model.stage and model.pretrained is not None and saved_step(run) == 0:  # else it is in checkpoints
        arguments += ["--copy", model.pretrained]
    for path in spec.program.stage if isinstance(spec, ProgramSpec) else ():
        arguments += ["--copy", path]
    return arguments


def _step(attempt: AttemptContext, name: str, *arguments: str) -> StepCommand | None:
    """Return a step that runs a script once per node. The text is passed, not the path: the step checks what a node sees."""
    text = asset(name).read_text(encoding="utf-8")
    words = ["bash", "-c", text, name, str(attempt.run.path), attempt.record.token, *arguments]
    argv = one_task_per_node(attempt.command, attempt.spec.job.nodes, words)
    return StepCommand(argv, one_task_environment(attempt.environ), attempt.run.srun_log) if argv else None
