"""The allocation of this job, from its script's environment."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.jobs import time_of
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.slurm.variables import ARRAY_ELEMENT


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
