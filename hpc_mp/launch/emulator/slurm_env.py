"""The environment of emulated ranks: the variables that srun sets, and those shared by all ranks."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpc_mp.cluster.slurm.allocation import FOREIGN
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.job import AnySpec
from hpc_mp.rundir.rank_env import emulated_node

# For ranks that share one machine. torch looks up the name of ::ffff:127.0.0.1 when it connects, which no name server knows. If
# the server is slow, hundreds of ranks wait for 5 s and try again, the defaults of resolv.conf(5).
EMULATED = {"HPC_MP_EMULATED": "1", "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"}


class TaskPlace(NamedTuple):
    """The place of a task: the index of its node, and its own index on that node; both from 0."""

    node: int
    local: int


def in_blocks(nodes: int, per_node: int) -> list[TaskPlace]:
    """Return the places of all tasks; each node is filled before the next one."""
    return [TaskPlace(*divmod(task, per_node)) for task in range(nodes * per_node)]


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the launching process's environment without variables of a scheduler or another launcher."""
    return {name: value for name, value in environ.items() if not FOREIGN.match(name)}


def shared_environment(spec: AnySpec, environ: Mapping[str, str], cores: int, ours: Mapping[str, str]) -> dict[str, str]:
    """Return variables that are the same in every rank of a job outside of Slurm, and that libraries read on import. ``environ``:
    the launching process's own environment. ``cores``: number of cores of this machine for all ranks. ``ours``: variables of the
    back end; ``environment.set`` overrides them."""
    return {
        "OMP_NUM_THREADS": str(max(1, cores // spec.ranks)),
        **inherited(environ),
        **ours,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else a library that queries GPUs on import would break the fork
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **spec.environment.set,
    }


def srun_environments(places: Sequence[TaskPlace], job_id: str, step: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the variables that srun would set for each task, by task. ``places``: places of all tasks; every node has the same
    number. ``job_id``: substitute for Slurm's job id. ``step``: additional variables of all tasks; they override those of the
    step, but not those of a task."""
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
