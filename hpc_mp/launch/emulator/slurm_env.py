"""The environment of emulated ranks: the names that srun sets, and what all ranks share. It is said here once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.cluster.slurm.variables import FOREIGN
from hpc_mp.job import AnySpec
from hpc_mp.rundir.rank_env import emulated_node

# Of ranks that share one machine. torch asks for the name of ::ffff:127.0.0.1 when it connects, which no name server knows; where
# one is slow to say so, hundreds of ranks wait for 5 s and try again: the defaults of resolv.conf(5).
EMULATED = {"HPC_MP_EMULATED": "1", "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"}


class TaskPlace(NamedTuple):
    """Where a task runs: the number of its node, and its own number on that node; both from 0."""

    node: int
    local: int


def in_blocks(nodes: int, per_node: int) -> list[TaskPlace]:
    """The places of all tasks, where each node is filled before the next one."""
    return [TaskPlace(*divmod(task, per_node)) for task in range(nodes * per_node)]


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The launching process's own environment, without what a scheduler or another launcher has set."""
    return {name: value for name, value in environ.items() if not FOREIGN.match(name)}


def shared_environment(spec: AnySpec, environ: Mapping[str, str], cores: int, ours: Mapping[str, str]) -> dict[str, str]:
    """What is the same in every rank of a job outside of Slurm, and read by libraries as they are imported.

    Args:
        environ: the launching process's own environment.
        cores: how many this machine has for all ranks.
        ours: what the back end adds; ``environment.set`` goes before it.
    """
    return {
        "OMP_NUM_THREADS": str(max(1, cores // spec.ranks)),
        **inherited(environ),
        **ours,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a library that asks for GPUs as it is imported would else spoil the fork
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **spec.environment.set,
    }


def srun_environments(places: Sequence[TaskPlace], job_id: str, step: Mapping[str, str]) -> list[dict[str, str]]:
    """What srun would tell each task, by task.

    Args:
        places: of all tasks; every node has as many.
        job_id: stands for Slurm's.
        step: what else all tasks get; it goes before the names of the step, and not before those of a task.
    """
    nodes = 1 + max(place.node for place in places)
    per_node = len(places) // nodes
    names = compress(map(emulated_node, range(nodes)))
    tasks = str(len(places))
    shared = {
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": names,
        "SLURM_JOB_NODELIST": names,
        "SLURM_TASKS_PER_NODE": str(per_node) if nodes == 1 else f"{per_node}(x{nodes})",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": job_id,
        **step,
    }
    return [{
        **shared,
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(place.local),
        "SLURM_NODEID": str(place.node),
        "SLURMD_NODENAME": emulated_node(place.node),
    } for task, place in enumerate(places)]
