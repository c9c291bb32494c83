"""What is packed on the login node, before a job that stages it on its nodes is submitted."""

from __future__ import annotations

import sys

from hpc_mp.job import JobSpec
from hpc_mp.launch.listener import Listener
from hpc_mp.launch.render.values import rank_python
from hpc_mp.launch.staging.archive import pack
from hpc_mp.launch.staging.interpreter import interpreter
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.records import RankStatus, StagedEnvironment, write_record


def stage_environment(spec: JobSpec, listener: Listener, *runs: RunDirectory) -> None:
    """Pack the ranks' Python environment if the job wants that, and note in its runs, for the supervisor, where the archive
    lies. The listener hears how many bytes are packed.

    Raises:
        HpcMpError: the environment cannot be packed.
    """
    if not spec.environment.stage:
        return
    shared = spec.model_copy(update={"environment": spec.environment.model_copy(update={"stage": False})})

    def show(done: int, size: int) -> None:
        listener.update(RankStatus(0, "packing the Python environment", done=done, total=size), ())

    with listener.following(spec.train.steps):
        packed = pack(interpreter([rank_python(shared, sys.executable)]), runs[0].cache, show)
    for run in runs:
        write_record(run.environment, StagedEnvironment(str(packed.archive), str(packed.prefix), packed.size))
