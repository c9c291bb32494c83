"""Run a plan on emulated nodes of this machine, to its end."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime

from hpc_mp.base.errors import HpcMpError
from hpc_mp.launch.backends.interrupts import Interrupts
from hpc_mp.launch.backends.judge import judge
from hpc_mp.launch.backends.progress import progress_for
from hpc_mp.launch.backends.watch import watch
from hpc_mp.launch.emulator.emulator import ENTRY, Emulator, Task
from hpc_mp.launch.emulator.slurm_env import rank_environments, shared_environment
from hpc_mp.launch.plan import Plan
from hpc_mp.launch.resume import Resumed
from hpc_mp.launch.run_files import begin
from hpc_mp.layout.models import family_of
from hpc_mp.report import conclude
from hpc_mp.rundir import LineFile
from hpc_mp.rundir.follow import AttemptReader
from hpc_mp.rundir.outcome import Outcome, figures


def launch_local(
    plan: Plan, resumed: Resumed | None, check: Callable[[], None], say: Callable[[str], None], entry: str = ENTRY
) -> Outcome:
    """Start every rank, follow them to their end and say what became of them.

    Args:
        resumed: the run to go on with; None for a new one.
        check: the last check before anything is written, made while the ranks' modules are imported.
        say: told where the run lies.
        entry: what a rank calls, ``"module:function"``.

    Raises:
        HpcMpError: what ``check`` finds; the run directory cannot be written; not Linux.
    """
    if sys.platform != "linux":
        raise HpcMpError(f"emulated nodes on {sys.platform}", "need Linux", "launch inside a Linux container")
    spec = plan.spec
    modules = (entry.partition(":")[0], *family_of(plan.shape.model_type).modules)
    environment = shared_environment(spec, os.environ, len(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        emulator = stack.enter_context(Emulator(modules, environment))
        check()
        interrupts = stack.enter_context(Interrupts())
        run, number, lock = stack.enter_context(begin(plan, resumed))
        say(f"run       {run.path}" + (f" (attempt {number})" if number > 1 else ""))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=max(128, spec.ranks)))
        told = rank_environments(spec, plan.placement, os.getpid(), listener.getsockname()[1])
        attempt = AttemptReader(run, number)
        tasks = [Task(run.rank_log(rank), environment) for rank, environment in enumerate(told)]
        emulator.start(tasks, run.job, listener, lock, entry)
        with progress_for(spec.train.steps) as progress:
            ended = watch(emulator, spec.ranks, attempt, interrupts, progress)
    state, cause = judge(ended, attempt, plan.placement)
    if cause is not None:
        log = LineFile(run.main_log)
        log.write(f"{datetime.now():%H:%M:%S} attempt {number} failed: {cause.message}")
        log.close()
    return conclude(Outcome(run.path, state, cause=cause, **figures(run, number)), number)
