"""All checks that only look: fast, and safe at any time beside a running job."""

from __future__ import annotations

from typing import Any

from hpc_mp.doctor.checks import cpu, disks, efa, fabric, gpu, growth, host, kernel, limits, memory, pci, processes, scale
from hpc_mp.doctor.checks.check import Check

PASSIVE: tuple[Check[Any], ...] = (
    *gpu.CHECKS, *fabric.CHECKS, *efa.CHECKS, *growth.CHECKS, *pci.CHECKS, *host.CHECKS, *limits.CHECKS, *memory.CHECKS,
    *cpu.CHECKS, *disks.CHECKS, *processes.CHECKS, *kernel.CHECKS, *scale.CHECKS,
)
