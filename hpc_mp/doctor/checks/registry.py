"""The passive checks, which are fast and safe beside a running job, and those that decide if a node gets a job."""

from typing import Any

from hpc_mp.doctor.checks import disks, fabric, gpu_nvlink, gpu_presence, gpu_state, growth, host, kernel, limits, pci
from hpc_mp.doctor.checks.check import Check

GPU: tuple[Check[Any], ...] = (
    *gpu_presence.CHECKS, *gpu_state.MEMORY, *gpu_state.CLOCKS, *pci.GPUS, *gpu_nvlink.CHECKS, *kernel.XIDS, *gpu_state.USE,
)
PASSIVE: tuple[Check[Any], ...] = (
    *GPU, *fabric.CHECKS, *fabric.EFA, *growth.CHECKS, *pci.NICS, *host.HOST, *limits.CHECKS, *host.MEMORY, *host.CPU,
    *disks.CHECKS, *host.PROCESSES, *kernel.CHECKS, *limits.KERNEL,
)
NEEDED = ("gpu-", "fabric-", "efa-", "gdr-", "nic-pcie", "limit-memlock", "memory-errors", "pci-errors", "kernel-hardware")
"""What a training cannot do without, or what makes it crawl: hardware and the fast network. How the host is set up, its disks and
mounts are left to the site; and the control group of who asks is not that of the ranks."""
FIT = tuple(check.code for check in PASSIVE if check.code.startswith(NEEDED))
"""The codes of the checks that decide whether a node gets a job."""
