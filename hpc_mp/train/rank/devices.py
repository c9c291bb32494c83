"""The device of a rank, and the check that all ranks' devices match."""

import os
from collections.abc import Sequence

import psutil
import torch

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir.rank_env import RankEnv


def choose_device(requested: str, who: RankEnv, ranks_per_node: int) -> tuple[torch.device, str]:
    """Return the device of this rank and the communication backend.

    ``auto`` takes a GPU if every rank of the machine gets one. ``cuda`` with fewer GPUs shares them, over gloo. All emulated
    nodes are one machine.

    Raises:
        HpcMpError: cuda is requested and no GPU exists.
    """
    emulated = os.environ.get("HPC_MP_EMULATED") == "1"
    index, ranks = (who.rank, who.world) if emulated else (who.local_rank, ranks_per_node)
    gpus = torch.cuda.device_count() if requested != "cpu" and torch.cuda.is_available() else 0
    if requested == "cpu" or (requested == "auto" and gpus < ranks):
        return torch.device("cpu"), "gloo"
    if gpus == 0:
        raise HpcMpError("job.device = cuda", f"torch {torch.__version__} sees no GPU on {who.node}",
                         "install a CUDA build of torch and a driver, or set job.device = \"cpu\"")
    device = torch.device("cuda", index % gpus)
    torch.cuda.set_device(device)
    return device, "cpu:gloo,cuda:nccl" if gpus >= ranks else "gloo"


def device_name(device: torch.device) -> str:
    """Return the GPU's model, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def device_memory(device: torch.device, ranks_per_node: int) -> int:
    """Return the bytes that a rank may use: its GPU's memory, or its share of the node's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // ranks_per_node


def check_devices(devices: Sequence[tuple[str, str]]) -> None:
    """Check that all ranks compute on devices of the same model, and on whole devices.

    Args:
        devices: node and device name of every rank.

    Raises:
        HpcMpError: with the nodes of each model.
    """
    nodes: dict[str, dict[str, None]] = {}
    for node, name in devices:
        nodes.setdefault(name, {})[node] = None
    listed = "; ".join(f"{name} on {', '.join(hosts)}" for name, hosts in nodes.items())
    if any("MIG" in name.split() for name in nodes):
        raise HpcMpError(f"devices: {listed}", "a MIG slice cannot exchange data with another one",
                         "ask for whole GPUs: set slurm.gpu_type, or slurm.constraint to nodes without MIG")
    if len(nodes) > 1:
        raise HpcMpError(f"devices: {listed}", "are of different models: every step would wait for the slowest",
                         "ask for one model: set slurm.gpu_type, or slurm.constraint")
