"""The back end for a plan on emulated nodes of this machine, to its end."""

import os
import resource
import secrets
import socket
import sys
from contextlib import ExitStack
from functools import partial

import psutil

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import need_trackers, need_train
from hpc_mp.cluster.node.nvidia_smi import find_gpus
from hpc_mp.job import AnySpec, ProgramSpec
from hpc_mp.launch.backends import mpi
from hpc_mp.launch.backends.backend import CallRequest, Launch, SubmittedTasks
from hpc_mp.launch.backends.emulated_program import start_program
from hpc_mp.launch.backends.interrupts import Interrupts
from hpc_mp.launch.backends.watch import conclude_ranks, judge, watch
from hpc_mp.launch.choices import GpuRequest, as_given
from hpc_mp.launch.emulator.emulator import ASSEMBLY, ENTRY, EmulatedRank, Emulator
from hpc_mp.launch.emulator.slurm_env import EMULATED, TaskPlace, shared_environment, srun_environments
from hpc_mp.launch.facts import ClusterFacts, outside
from hpc_mp.launch.plan import JobPlan, Target, TrainingPlan
from hpc_mp.launch.program.plan import ProgramPlan
from hpc_mp.launch.run_files import begin
from hpc_mp.layout.models import family_of
from hpc_mp.planner.device import choose, local_device
from hpc_mp.rundir import SECRET, RunDirectory
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.outcome import Outcome
from hpc_mp.rundir.rank_env import check_open_files


def _gpus(spec: AnySpec, facts: ClusterFacts) -> GpuRequest:
    if isinstance(spec, ProgramSpec):  # its torch, if any, may differ from ours
        return as_given(spec, choose(spec.job.device, spec.ranks, find_gpus(), True, psutil.virtual_memory().total))
    return as_given(spec, local_device(spec.job.device, spec.ranks))


CHECK = "hpc_mp.launch.model_check:check_model"  # called in a process that imports transformers anyway
TARGET = Target("emulated on this machine", outside, _gpus, in_script=False)


def start(launch: Launch, entry: str = ENTRY) -> Outcome:
    """Start every rank, follow all to their end and return the outcome. The last check is made in the process that imports the
    ranks' modules. ``entry``: the function that a rank calls, ``"module:function"``. Raises HpcMpError if the check fails, the
    run directory cannot be written, this is not Linux, or a library of the rank half is missing."""
    plan, listener = launch.plan, launch.listener
    if isinstance(plan, ProgramPlan):
        by_mpirun = plan.spec.program.start == "mpi"
        return mpi.start_program(launch, plan, emulated=True) if by_mpirun else start_program(launch, plan)
    assert isinstance(plan, TrainingPlan)
    if sys.platform != "linux":
        raise HpcMpError(f"emulated nodes on {sys.platform}", "need Linux", "launch inside a Linux container")
    need_train("launch --on local")
    spec = plan.spec
    need_trackers(spec.track.to)
    groups = spec.parallel.tensor + spec.data_degree * spec.parallel.context  # gloo connects all members of a group
    check_open_files(spec.ranks + groups, resource.getrlimit(resource.RLIMIT_NOFILE)[1], "on this machine")
    modules = (entry.partition(":")[0], ASSEMBLY, *family_of(plan.shape).modules)
    environment = shared_environment(spec, os.environ, len(os.sched_getaffinity(0)), EMULATED)
    with ExitStack() as stack:
        emulator = stack.enter_context(Emulator(modules, environment))
        launch.check(partial(emulator.call, CHECK))
        interrupts = stack.enter_context(Interrupts())
        run, number, lock = stack.enter_context(begin(plan, launch.resumed))
        listener.say(f"run       {run.path}" + (f" (attempt {number})" if number > 1 else ""))
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=max(128, spec.ranks)))
        attempt = AttemptReader(run, number)
        emulator.start(_ranks(plan, run, server.getsockname()[1]), run.job, server, lock, entry)
        with listener.following(spec.train.steps):
            ended = watch(emulator, attempt, interrupts, listener)
    state, cause = judge(ended, attempt, plan.placement)
    return conclude_ranks(attempt, state, cause, listener)


def submit(request: CallRequest) -> SubmittedTasks:
    """Run a Python callable on emulated nodes, which end with the returned object."""
    from hpc_mp.launch.submit.tasks import EmulatedTasks  # submitit is slow to import

    return EmulatedTasks(request)


def _ranks(plan: JobPlan, run: RunDirectory, port: int) -> list[EmulatedRank]:
    """Return all ranks in order; rank 0 listens on ``port`` of this machine."""
    step = {"SLURM_JOB_NAME": plan.spec.job.name, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            SECRET: secrets.token_hex(16), **plan.spec.environment.set}
    places = [TaskPlace(place.node, place.local_rank) for place in plan.placement.ranks]
    environs = srun_environments(places, str(os.getpid()), step)
    return [EmulatedRank(run.rank_log(rank), environ) for rank, environ in enumerate(environs)]
