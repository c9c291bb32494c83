"""The place where a job runs, with the reason; the allocation of this job, from its script's environment; and the environment
variables of schedulers and launchers that a new job, or a step of this allocation, may inherit."""

import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.jobs import time_of
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.slurm.query import why_silent

# Variables that a scheduler or another launcher left here do not concern our ranks.
FOREIGN = re.compile(r"SLURM_|SLURMD_|SRUN_|PMI|OMPI_|PRTE_|HYDI_|MPI_LOCALN?RANK|PALS_|TORCHELASTIC_|"
                     r"HPC_MP_(EMULATED|LISTEN_FD|TOKEN|SECRET|MPI|LOCAL|STAGED|RUN)$|"
                     r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT)$")
STARTERS = frozenset({"srun", "sbatch", "salloc"})  # programs of Slurm that start ranks, or a job that starts them
ARRAY_ELEMENT = "SLURM_ARRAY_TASK_ID"  # the number of an array's element
_DEFAULTS = re.compile(r"SBATCH_|SALLOC_")  # options that sbatch and srun take from the environment
_ACCESS = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})  # how programs reach the controller
_ALLOCATION = frozenset({"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME", "SLURM_JOB_END_TIME"})
_COMPONENT_TASKS = re.compile(r"SLURM_N?(TASKS|PROCS)(_PER_NODE)?_HET_GROUP_")


def job_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environ`` for a separate job, without variables of another job, a launcher or a profile. ``SLURM_*`` and
    ``SBATCH_*`` would silently override the job's own options."""
    return _keep(environ, _ACCESS)


def step_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environ`` for a step of this allocation: of Slurm's variables only those that name the allocation.

    The others describe the current shell or notebook step, and srun would read them as options. Our step overlaps that step,
    which holds the CPUs and GPUs; otherwise srun would wait forever.
    """
    return _keep(environ, _ACCESS | _ALLOCATION) | {"SLURM_OVERLAP": "1"}


def one_task_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables that make srun start as many tasks in each component as the ranks' step has."""
    return {name: value for name, value in environ.items() if not _COMPONENT_TASKS.match(name)}


def _keep(environ: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in names or not (FOREIGN.match(name) or _DEFAULTS.match(name))}


@dataclass(frozen=True, slots=True)
class Allocation:
    """One start of a job."""

    job_id: str  # the id for scontrol: of an array's element its own, of a heterogeneous job its first component's
    restart: int  # number of times that Slurm has requeued the job
    hosts: tuple[str, ...]  # hosts of all components, in Slurm's order
    cluster: str  # its name, the key of the ledger of bad nodes
    end: float | None  # unix time in seconds at which Slurm ends the job; None if Slurm does not report it


def allocation(environ: Mapping[str, str], ask: Runner = ask) -> Allocation | None:
    """Return the allocation; None outside of Slurm."""
    if "SLURM_JOB_ID" not in environ:
        return None
    groups = int(environ.get("SLURM_HET_SIZE", "0"))
    lists = [environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in range(groups)] or [environ["SLURM_JOB_NODELIST"]]
    job_id = environ.get("SLURM_HET_JOB_ID") or environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in environ:  # the last element's own id equals the id of the whole array
        job_id = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ[ARRAY_ELEMENT]}"
    return Allocation(job_id, int(environ.get("SLURM_RESTART_COUNT", "0")),
                      tuple(host for nodelist in lists for host in expand(nodelist)),
                      environ.get("SLURM_CLUSTER_NAME", "cluster"), end_of(environ, job_id, ask))


@dataclass(frozen=True, slots=True)
class AllocatedTasks:
    """The request of an allocation: its nodes, and tasks and GPUs on each of them; 0 if not stated."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int


def allocated_tasks(environ: Mapping[str, str]) -> AllocatedTasks:
    """Return the request of this shell's allocation. SLURM_TASKS_PER_NODE is not used: it may count CPUs instead of tasks."""

    def number(name: str) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdigit() else 0

    nodes = max(1, number("SLURM_JOB_NUM_NODES") or number("SLURM_NNODES"))
    tasks = number("SLURM_NTASKS_PER_NODE") or (number("SLURM_NTASKS") // nodes if number("SLURM_NTASKS") % nodes == 0 else 0)
    return AllocatedTasks(nodes, tasks, number("SLURM_GPUS_ON_NODE"))


def end_of(environ: Mapping[str, str], job_id: str, ask: Runner = ask) -> float | None:
    """Return the end of a job in unix seconds: as set at its start if ``environ`` has it (``SLURM_JOB_END_TIME``, since Slurm
    23.02), else squeue's current value; None if unknown."""
    variable = environ.get("SLURM_JOB_END_TIME", "")
    if variable.isdigit():
        return float(variable)
    try:
        answer = ask(("squeue", "--noheader", "--format=%e", "--jobs", job_id)).strip().splitlines()[0]
    except (CommandFailed, IndexError):  # a site may forbid squeue on its nodes
        return None
    end = time_of(answer)
    return end if end is not None and end > time.time() else None


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a job."""

    place: str  # "step" (of the allocation we are inside), "slurm" (a new job), "local" (emulated nodes), or another back end
    why: str  # the reason for this place
    missed: str = ""  # a note to repeat at the end: Slurm's programs are here, and yet the job did not go to Slurm


def decide(on: str, environ: Mapping[str, str] = os.environ, ask: Runner = ask) -> Where:
    """Decide where to run. ``on``: "auto", "slurm" or the name of another back end, which is used unchecked."""
    if on not in ("auto", "slurm"):
        return Where(on, f"--on {on}")
    outside = why_outside(environ, ask)
    if outside is None:
        return Where("step", f"inside the live allocation {environ['SLURM_JOB_ID']}")
    if on == "slurm":
        return Where("slurm", "--on slurm")
    silent = why_silent(ask)
    if silent is None:
        return Where("slurm", f"scontrol ping answers; {outside}")
    return Where("local", f"{silent}; {outside}", _missed(silent, environ))


def _missed(silent: str, environ: Mapping[str, str]) -> str:
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        return ""
    unset = "" if "SLURM_CONF" in environ else ", and SLURM_CONF is not set: export it if slurm.conf is not in the default place"
    return f"sbatch is on PATH, but no Slurm answers ({silent}){unset}"


def why_outside(environ: Mapping[str, str], ask: Runner) -> str | None:
    """Return why we are outside; None inside a live allocation. ``SLURM_JOB_ID`` proves nothing: shells outlive their jobs."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return "not inside an allocation"
    try:
        state = ask(("squeue", "--noheader", "--format=%T", "--jobs", job)).strip()
    except CommandFailed as error:
        return f"SLURM_JOB_ID={job} is not a live allocation ({str(error).splitlines()[-1]})"
    return None if state == "RUNNING" else f"the allocation {job} is {state or 'gone'}"
