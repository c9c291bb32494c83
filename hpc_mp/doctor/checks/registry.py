"""The passive checks, which are fast and safe beside a running job, and those that decide if a node gets a job."""

from typing import Any

from hpc_mp.doctor.checks import (
    cpu,
    disks,
    fabric,
    gpu_clocks,
    gpu_memory,
    gpu_nvlink,
    gpu_pcie,
    gpu_presence,
    growth,
    host,
    kernel,
    limits,
    memory,
    pci,
)
from hpc_mp.doctor.checks.check import Check

GPU: tuple[Check[Any], ...] = (
    *gpu_presence.CHECKS, *gpu_memory.CHECKS, *gpu_clocks.CHECKS, *gpu_pcie.CHECKS, *gpu_nvlink.CHECKS, *kernel.XIDS,
    *gpu_clocks.USE,
)
PASSIVE: tuple[Check[Any], ...] = (
    *GPU, *fabric.CHECKS, *fabric.EFA, *growth.CHECKS, *pci.CHECKS, *host.CHECKS, *limits.CHECKS, *memory.CHECKS,
    *cpu.CHECKS, *disks.CHECKS, *cpu.PROCESSES, *kernel.CHECKS, *limits.KERNEL,
)
NEEDED = ("gpu-", "fabric-", "efa-", "gdr-", "nic-pcie", "limit-memlock", "memory-errors", "pci-errors", "kernel-hardware")
"""What a training cannot do without, or what makes it crawl: hardware and the fast network. How the host is set up, its disks and
mounts are left to the site; and the control group of who asks is not that of the ranks."""
FIT = tuple(check.code for check in PASSIVE if check.code.startswith(NEEDED))
"""The codes of the checks that decide whether a node gets a job."""
