"""Short steps before and after the ranks: one task per node, in plain bash.

Before: check that the run directory is visible, create the node's own directory, and stage files. After: if ranks failed, keep
the files that libraries left on the node; remove the node's own directory.
"""

import math
import re
import sys
from collections.abc import Sequence

from hpc_mp.base.assets import asset
from hpc_mp.base.line_file import NewLines
from hpc_mp.cluster.slurm.allocation import one_task_environment
from hpc_mp.cluster.slurm.steps import NO_GPUS, failed_nodes, one_task_per_node, use_up_numbers
from hpc_mp.job import AnySpec, JobSpec, ProgramSpec
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.history import saved_step
from hpc_mp.rundir.outcome import STOPPED
from hpc_mp.rundir.records import StagedEnvironment, read_record
from hpc_mp.supervisor.context import AttemptContext
from hpc_mp.supervisor.signals import EARLY, Signals
from hpc_mp.supervisor.srun import StepEnd, follow

HEALTH = "--health"
NO_GPUS_FOR_IT = re.compile(r"Unable to create step for job \S+: (Insufficient GRES|Invalid generic resource|Invalid Trackable)")
END_S = 60.0  # a node that cannot be cleaned up must not delay the others


def start(attempt: AttemptContext, signals: Signals) -> int:
    """Prepare every node. Return the step's exit code, 0 if srun does not start the ranks, ``STOPPED`` if it was to stop."""
    if attempt.allocation is not None and attempt.allocation.restart:
        use_up_numbers(attempt.command, one_task_environment(attempt.environ), attempt.allocation.restart)
    ended = _step(attempt, "slurm/node-start.sh", _start_arguments(attempt.run, attempt.spec), signals)
    code = ended.code if ended else 0
    return STOPPED if signals.stop_requested and code in (0, *EARLY) else code


def end(attempt: AttemptContext, failed: bool) -> tuple[str, ...] | None:
    """Keep evidence of a failure, and clean up; lost nodes are ignored. Returns the nodes that srun could not reach; None if srun
    did not end in time and they are unknown."""
    new_lines = NewLines(attempt.run.srun_log)
    new_lines.read()  # of earlier steps
    ended = _step(attempt, "slurm/node-end.sh", ["failed" if failed else "done"], None, END_S)
    if ended is None:
        return ()
    return None if ended.forced else tuple(failed_nodes(new_lines.read()))


def _start_arguments(run: RunDirectory, spec: AnySpec) -> list[str]:
    """Return the arguments of ``node-start.sh``: checks, and files to stage."""
    arguments = [HEALTH, sys.executable] if spec.environment.health else []
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


def _step(attempt: AttemptContext, name: str, arguments: Sequence[str], signals: Signals | None,
          at_most: float = math.inf) -> StepEnd | None:
    """Run a script once per node. The text is passed, not the path: the step checks what a node sees. Return None if srun does
    not start the ranks. Slurm may refuse a step with all of a script's GPUs; this one is then run without any, and does not
    check them."""
    text = asset(name).read_text(encoding="utf-8")
    words = ["bash", "-c", text, name, str(attempt.run.path), attempt.record.token]
    argv = one_task_per_node(attempt.command, attempt.spec.job.nodes, [*words, *arguments])
    if argv is None:
        return None
    new_lines = NewLines(attempt.run.srun_log)
    new_lines.read()
    environ = one_task_environment(attempt.environ)
    ended = follow(argv, environ, attempt.run.srun_log, signals, at_most=at_most)
    by_script = isinstance(attempt.spec, ProgramSpec) and attempt.spec.by_script
    if ended.code == 0 or not by_script or not any(map(NO_GPUS_FOR_IT.search, new_lines.read())):
        return ended
    unchecked = arguments[2:] if arguments[:1] == [HEALTH] else arguments
    argv = one_task_per_node([*attempt.command[:1], NO_GPUS, *attempt.command[1:]], attempt.spec.job.nodes, [*words, *unchecked])
    return follow(argv or (), environ, attempt.run.srun_log, signals, at_most=at_most)
