"""All checks of GPUs."""

from __future__ import annotations

from typing import Any

from hpc_mp.doctor.checks import gpu_clocks, gpu_log, gpu_memory, gpu_nvlink, gpu_pcie, gpu_presence, gpu_use
from hpc_mp.doctor.checks.check import Check

CHECKS: tuple[Check[Any], ...] = (
    *gpu_presence.CHECKS, *gpu_memory.CHECKS, *gpu_clocks.CHECKS, *gpu_pcie.CHECKS, *gpu_nvlink.CHECKS, *gpu_log.CHECKS,
    *gpu_use.CHECKS,
)
