"""The environment of emulated ranks: the names that srun sets, and what the ranks share."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.cluster.slurm.variables import FOREIGN
from hpc_mp.job import JobSpec
from hpc_mp.layout.placement import Placement


def node_name(node: int) -> str:
    return f"node{node}"


def shared_environment(spec: JobSpec, environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """What is the same in every rank and read by libraries as they are imported.

    Args:
        environ: the launcher's own environment; of it, what another scheduler set is left out.
        cores: how many this machine has for all ranks.
    """
    inherited = {name: value for name, value in environ.items() if not FOREIGN.match(name)}
    return {
        "OMP_NUM_THREADS": str(max(1, cores // spec.ranks)),
        **inherited,
        "HPC_MP_EMULATED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a library that asks for GPUs as it is imported would else spoil the fork
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **spec.environment.set,
    }


def rank_environments(spec: JobSpec, placement: Placement, job_id: int, port: int) -> list[dict[str, str]]:
    """What srun would tell each rank, by rank. ``environment.set`` goes before what they share, not before its own.

    Args:
        job_id: stands for Slurm's.
        port: where rank 0 listens, on this machine.
    """
    nodes, per_node = placement.nodes, placement.ranks_per_node
    names = compress(map(node_name, range(nodes)))
    ranks = str(len(placement.ranks))
    step = {
        "SLURM_NTASKS": ranks,
        "SLURM_NPROCS": ranks,
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": names,
        "SLURM_JOB_NODELIST": names,
        "SLURM_TASKS_PER_NODE": str(per_node) if nodes == 1 else f"{per_node}(x{nodes})",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NAME": spec.job.name,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{
        **step,
        **spec.environment.set,
        "SLURM_PROCID": str(place.rank),
        "SLURM_LOCALID": str(place.local_rank),
        "SLURM_NODEID": str(place.node),
        "SLURMD_NODENAME": node_name(place.node),
    } for place in placement.ranks]
