"""The device of emulated ranks, and the check that the model's state fits there."""

import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import memory_size
from hpc_mp.cluster.node.nvidia_smi import Gpu, find_gpus
from hpc_mp.job.values import toml_value
from hpc_mp.layout.layout import Layout

Asked = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Pool:
    """One memory and the ranks that share it; ``size`` in bytes, None if unknown."""

    name: str
    size: int | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """The device that ranks compute on, the reason, and the memories they use (unknown: no pools)."""

    kind: Asked
    why: str
    pools: tuple[Pool, ...] = ()
    gpu: str | None = None  # the driver's or Slurm's name of the GPU that each rank has for itself; None if unknown


def local_device(requested: Asked, ranks: int) -> Device:
    """Return the device of ``ranks`` emulated ranks here. Raises HpcMpError like ``choose``."""
    return choose(requested, ranks, find_gpus(), torch_has_cuda(), psutil.virtual_memory().total)


def choose(requested: Asked, ranks: int, gpus: Sequence[Gpu], cuda_built: bool, memory: int) -> Device:
    """Choose the device. ``auto`` is cuda if every rank gets its own GPU; ``cuda`` with fewer lets rank r share GPU r mod GPUs.
    Raises HpcMpError if cuda is requested and no GPU exists, or torch cannot use it. ``cuda_built``: True if the installed torch
    can use GPUs. ``memory``: memory of this machine, in bytes."""
    lacking = ""
    if not gpus:
        lacking = "nvidia-smi finds no GPU"
    elif not cuda_built:
        lacking = "the installed torch is built without CUDA"
    if requested == "cuda" and lacking:
        raise HpcMpError("job.device = cuda", lacking, "use job.device = \"cpu\" or \"auto\"")
    if requested == "cpu" or lacking or (requested == "auto" and len(gpus) < ranks):
        why = "job.device = cpu" if requested == "cpu" else lacking or f"{len(gpus)} GPUs are fewer than {ranks} ranks"
        return Device("cpu", why, (Pool("this machine", memory, tuple(range(ranks))),))
    why = "a GPU for every rank" if len(gpus) >= ranks else f"{ranks} ranks share {len(gpus)} GPUs"
    used = gpus[:ranks]
    shares = (tuple(range(n, ranks, len(used))) for n in range(len(used)))
    return Device("cuda", why, tuple(Pool(f"GPU {gpu.index} ({gpu.name})", gpu.memory, share)
                                     for gpu, share in zip(used, shares, strict=True)),
                  used[0].name if len({gpu.name for gpu in used}) == 1 and len(used) == ranks else None)


def check_memory(state: Sequence[int], device: Device) -> None:
    """Refuse a model whose state cannot fit. Raises HpcMpError, with the arithmetic, for the first memory that is too small.
    ``state``: bytes of parameters, gradients and optimizer state, by rank."""
    for pool in device.pools:
        need = sum(state[rank] for rank in pool.ranks)
        if pool.size is not None and need > pool.size:
            raise HpcMpError(
                f"{memory_size(need)} of model state (parameters, gradients, optimizer) of the {len(pool.ranks)} ranks"
                f" on {pool.name}",
                f"is more than its {memory_size(pool.size)} of memory",
                "use a smaller model, parallel.zero = 3, optimizer = \"sgd\", a narrower precision or a larger machine")


def check_offload(layout: Layout, device: Device) -> None:
    """Refuse to offload into the memory that holds everything already. Raises HpcMpError."""
    if "optimizer" in layout.offload and layout.offload_directory is None and device.kind == "cpu":
        raise HpcMpError(f"parallel.offload = {toml_value(layout.offload)}",
                         "has no effect on CPUs: their memory is the host's",
                         "name a disk of the nodes with parallel.offload_directory, or leave it out")


def torch_has_cuda() -> bool:
    """Return True if torch has CUDA, read from its version file: importing torch costs a second."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"] is not None
