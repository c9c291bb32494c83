"""The short steps before and after the ranks: one task per node, in plain bash.

Before: the run directory is proved to be seen, the node's own directory made, what is to be staged is staged. After: what
libraries left on the node is kept when ranks failed, and the node's own directory is removed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hpc_mp.base.assets import asset
from hpc_mp.cluster.slurm.steps import one_task_per_node
from hpc_mp.cluster.slurm.variables import one_task_environment
from hpc_mp.job import JobSpec
from hpc_mp.rundir import TOKEN, RunDirectory
from hpc_mp.rundir.history import saved_step
from hpc_mp.rundir.records import StagedEnvironment, read_record
from hpc_mp.supervisor.signals import Signals
from hpc_mp.supervisor.srun import follow

END_S = 60.0  # a node that cannot be tidied up must not keep the others waiting


def start(run: RunDirectory, spec: JobSpec, srun: Sequence[str], environ: Mapping[str, str], signals: Signals) -> int:
    """Prepare every node; the step's exit code, 0 also where ranks are not started by srun."""
    command = _script("slurm/node-start.sh", run, environ, *_wanted(run, spec))
    step = one_task_per_node(srun, spec.job.nodes, command)
    return follow(step, one_task_environment(environ), run.srun_log, signals).code if step else 0


def end(run: RunDirectory, spec: JobSpec, srun: Sequence[str], environ: Mapping[str, str], failed: bool) -> None:
    """Keep what tells of a failure, and tidy up; nodes that are gone do not matter."""
    command = _script("slurm/node-end.sh", run, environ, "failed" if failed else "done")
    step = one_task_per_node(srun, spec.job.nodes, command)
    if step:
        follow(step, one_task_environment(environ), run.srun_log, None, at_most=END_S)


def _wanted(run: RunDirectory, spec: JobSpec) -> list[str]:
    """What ``node-start.sh`` is to look at and to stage."""
    words = ["--health", sys.executable] if spec.environment.health else []
    words += ["--gpus"] if spec.job.device == "cuda" else []
    if spec.environment.stage:
        packed = read_record(run.environment, StagedEnvironment)
        words += ["--environment", packed.archive, packed.prefix]
    if spec.model.stage and spec.model.pretrained is not None and saved_step(run) == 0:  # later state is in checkpoints
        words += ["--copy", spec.model.pretrained]
    return words


def _script(name: str, run: RunDirectory, environ: Mapping[str, str], *arguments: str) -> list[str]:
    """The script's text, not its path: the step is there to find out what a node can see."""
    return ["bash", "-c", asset(name).read_text(encoding="utf-8"), name, str(run.path), environ[TOKEN], *arguments]
