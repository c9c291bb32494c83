"""How much memory a rank uses."""

from __future__ import annotations

import resource

import psutil
import torch

from hpc_mp.engine.optimizer import Optimizer
from hpc_mp.engine.tensor import local


def peak_bytes(device: torch.device) -> int:
    """Largest memory so far: allocated on the GPU, or the resident set of the process on a CPU (``ru_maxrss`` is in KiB)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_bytes(device: torch.device, ranks_per_node: int) -> int:
    """What a rank may use: the GPU's memory, or its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // ranks_per_node


def held_bytes(optimizer: Optimizer) -> dict[str, int]:
    """Bytes of parameters and optimizer state that this rank holds between steps."""
    parameters = sum(local(held.parameter).nbytes for held in optimizer.held)
    state = sum(local(tensor).nbytes for held in optimizer.held for tensor in held.state.values())
    return {"parameters": parameters, "optimizer": state}
