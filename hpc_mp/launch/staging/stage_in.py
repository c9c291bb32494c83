"""What is packed on the login node, before a job that stages it on its nodes is submitted."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import Progress

from hpc_mp.job import JobSpec
from hpc_mp.launch.render.values import rank_python
from hpc_mp.launch.staging.archive import pack
from hpc_mp.launch.staging.interpreter import interpreter
from hpc_mp.rundir import RunDirectory, write_json


def stage_environment(spec: JobSpec, *runs: RunDirectory) -> None:
    """Pack the ranks' Python environment if the job wants that, and note in its runs, for the host, where the archive lies.

    Raises:
        HpcMpError: the environment cannot be packed.
    """
    if not spec.environment.stage:
        return
    shared = spec.model_copy(update={"environment": spec.environment.model_copy(update={"stage": False})})
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("packing the Python environment", total=None)
        packed = pack(interpreter([rank_python(shared, sys.executable)]), runs[0].cache,
                      lambda done, size: bar.update(task, completed=done, total=size))
    for run in runs:
        write_json(run.environment, {"archive": str(packed.archive), "prefix": str(packed.prefix), "bytes": packed.size})
