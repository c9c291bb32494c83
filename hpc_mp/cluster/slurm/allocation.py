"""What Slurm has given this job, as its script's environment tells."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.nodelist import expand


@dataclass(frozen=True, slots=True)
class Allocation:
    """One start of a job.

    Attributes:
        job_id: what scontrol takes: of an array's element its own, of a heterogeneous job its first component's.
        restart: how often Slurm has queued the job again.
        hosts: of all components, in Slurm's order.
        cluster: its name, by which bad nodes are remembered.
        end: unix seconds at which Slurm ends the job; None when it does not say.
    """

    job_id: str
    restart: int
    hosts: tuple[str, ...]
    cluster: str
    end: float | None


def allocation(environ: Mapping[str, str], ask: Runner = ask) -> Allocation | None:
    """None outside of Slurm."""
    if "SLURM_JOB_ID" not in environ:
        return None
    groups = int(environ.get("SLURM_HET_SIZE", "0"))
    lists = [environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in range(groups)] or [environ["SLURM_JOB_NODELIST"]]
    job_id = environ.get("SLURM_HET_JOB_ID") or environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in environ:  # the last element's own id is that of the whole array
        job_id = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return Allocation(job_id, int(environ.get("SLURM_RESTART_COUNT", "0")),
                      tuple(host for nodelist in lists for host in expand(nodelist)),
                      environ.get("SLURM_CLUSTER_NAME", "cluster"), end_of(environ, job_id, ask))


@dataclass(frozen=True, slots=True)
class AllocatedTasks:
    """What an allocation was asked for: its nodes, and tasks and GPUs on each of them; 0 where it does not say."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int


def allocated_tasks(environ: Mapping[str, str]) -> AllocatedTasks:
    """Of the allocation whose shell this is. SLURM_TASKS_PER_NODE is not asked: without a word of tasks it counts CPUs."""

    def number(name: str) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdigit() else 0

    nodes = max(1, number("SLURM_JOB_NUM_NODES") or number("SLURM_NNODES"))
    tasks = number("SLURM_NTASKS_PER_NODE") or (number("SLURM_NTASKS") // nodes if number("SLURM_NTASKS") % nodes == 0 else 0)
    return AllocatedTasks(nodes, tasks, number("SLURM_GPUS_ON_NODE"))


def end_of(environ: Mapping[str, str], job_id: str, ask: Runner = ask) -> float | None:
    """Of a job, in unix seconds: as it was at its start, where ``environ`` says so (``SLURM_JOB_END_TIME``, from Slurm 23.02 on),
    else as squeue has it now; None where nobody says."""
    given = environ.get("SLURM_JOB_END_TIME", "")
    if given.isdigit():
        return float(given)
    try:
        said = ask(("squeue", "--noheader", "--format=%e", "--jobs", job_id)).strip().splitlines()[0]
        end = datetime.fromisoformat(said).timestamp()
    except (CommandFailed, IndexError, ValueError):  # "NONE", "N/A", or a site that forbids squeue on its nodes
        return None
    return end if end > time.time() else None
