"""The lines of azure.conf and gres.conf that ``azslurm scale`` of cyclecloud-slurm 4.0.9 writes for a node array."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_mp.catalogue import MachineType

DAMPEN = 5  # per cent of the memory that is held back: the template's default, and azslurm's
_LEAST_HELD = 1024  # MiB


@dataclass(frozen=True, slots=True)
class Lines:
    """``memory``: MiB that Slurm hands out on a node."""

    partition: str
    node: str
    gres: str
    memory: int


def slurm_lines(cluster: str, array: str, size: MachineType, nodes: int, *, default: bool, one_thread: bool) -> Lines:
    """As slurmcc/partition.py and slurmcc/cli.py of Azure/cyclecloud-slurm compute them.

    Args:
        one_thread: slurm.use_pcpu is false: every hardware thread is a CPU of its own.
    """
    prefix = re.sub(r"[^a-zA-Z0-9-]", "-", f"{cluster}-{array}-")
    names = f"{prefix}1" if nodes == 1 else f"{prefix}[1-{nodes}]"
    whole = size.memory_gib * 1024
    memory = max(1024, int(whole - max(_LEAST_HELD, whole * DAMPEN / 100)))
    threads = 1 if one_thread else size.threads
    return Lines(
        partition=f"PartitionName={array} Nodes={names} Default={'YES' if default else 'NO'} "
                  f"DefMemPerCPU={memory // size.vcpus} MaxTime=INFINITE State=UP",
        node=f"Nodename={names} Feature=cloud STATE=CLOUD CPUs={size.vcpus} ThreadsPerCore={threads} RealMemory={memory}"
             + (f" Gres=gpu:{size.gpus}" if size.gpus else ""),
        gres=f"Nodename={names} Name=gpu Count={size.gpus} File={_devices(size)}" if size.gpus else "",
        memory=memory,
    )


def _devices(size: MachineType) -> str:
    if size.gpu_vendor == "amd":
        numbers = [str(128 + 8 * at) for at in range(size.gpus)]
        return f"/dev/dri/renderD{numbers[0] if len(numbers) == 1 else '[' + ','.join(numbers) + ']'}"
    return "/dev/nvidia0" if size.gpus == 1 else f"/dev/nvidia[0-{size.gpus - 1}]"
