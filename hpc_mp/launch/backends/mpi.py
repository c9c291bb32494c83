"""``--on mpi``: ranks started by the mpirun on PATH, on the hosts known to it, without Slurm."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from hpc_mp.base.command import Runner
from hpc_mp.job import AnySpec
from hpc_mp.launch.backends.backend import Launch
from hpc_mp.launch.backends.step import follow
from hpc_mp.launch.choices import as_given
from hpc_mp.launch.emulator.slurm_env import EMULATED, inherited, shared_environment
from hpc_mp.launch.facts import outside
from hpc_mp.launch.model_check import check_model
from hpc_mp.launch.plan import Target
from hpc_mp.launch.program.plan import ProgramPlan
from hpc_mp.launch.run_files import begin
from hpc_mp.planner.device import Device
from hpc_mp.program.mpirun import as_root, family, patient
from hpc_mp.rundir import TOKEN, RunDirectory
from hpc_mp.rundir.outcome import Outcome

OTHERWISE = "start ranks yourself: HPC_MP_MPI=1 mpirun … hpc-mp train job.toml"


TARGET = Target("under mpirun", outside, lambda spec, _facts: as_given(
    spec, Device(spec.job.device, "mpirun's hosts are not known here")), in_script=False)


def start(launch: Launch) -> Outcome:
    """Run all ranks under mpirun, to their end. Raises HpcMpError if mpirun is missing or of an unknown family, or the run
    directory cannot be written."""
    if isinstance(launch.plan, ProgramPlan):
        return start_program(launch, launch.plan)
    launch.check(check_model)
    environ = shared_environment(launch.plan.spec, os.environ, len(os.sched_getaffinity(0)), mpirun_environment())
    return _supervised(launch, mpirun(launch.plan.spec), environ, lambda run: ["hpc_mp", "train", str(run.job)])


def start_program(launch: Launch, plan: ProgramPlan, emulated: bool = False) -> Outcome:
    """Run the user's program under mpirun, to its end. ``emulated``: True for emulated nodes of this machine, whatever hosts
    mpirun knows. Raises HpcMpError as ``start``."""
    cores = len(os.sched_getaffinity(0))
    environ = {"OMP_NUM_THREADS": str(max(1, cores // plan.spec.ranks)), **inherited(os.environ),
               **(EMULATED if emulated else {}), **mpirun_environment(), **plan.spec.environment.set}
    launcher, ranks = family(patient, OTHERWISE, 'program.start = "mpi"'), plan.spec.ranks
    options = launcher.options(ranks, plan.spec.job.ranks_per_node, [TOKEN, "OMP_NUM_THREADS", *plan.spec.environment.set])
    options += launcher.local(ranks) if emulated else []
    return _supervised(launch, options, environ, lambda run: ["hpc_mp.program", str(run.path)])


def _supervised(launch: Launch, options: Sequence[str], environ: Mapping[str, str],
                rank: Callable[[RunDirectory], list[str]]) -> Outcome:
    """Run mpirun under the supervisor. ``rank``: returns the module that each rank runs, and its arguments."""
    python = [sys.executable, "-P", "-m"]
    with begin(launch.plan, launch.resumed) as begun:
        run = begun.run
        argv = [*python, "hpc_mp.supervisor", str(run.path), "--", "mpirun", *options, *python, *rank(run)]
        return follow(argv, environ, run.supervisor_log, begun, launch)


def mpirun(spec: AnySpec, ask: Runner = patient) -> list[str]:
    """Return mpirun's options for this job. Raises HpcMpError if mpirun is not on PATH, or of an unknown family."""
    variables = (TOKEN, "HPC_MP_MPI", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM")
    return family(ask, OTHERWISE).options(spec.ranks, spec.job.ranks_per_node, [*variables, *spec.environment.set])


def mpirun_environment() -> dict[str, str]:
    """Return variables for every process under mpirun: a mark by which we find its ranks, and Open MPI's consent to root."""
    return {"HPC_MP_MPI": "1", **as_root()}
