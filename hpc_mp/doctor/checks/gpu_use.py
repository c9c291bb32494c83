"""Checks of the modes of NVIDIA GPUs and of the processes that use them."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_mp.base.findings import Severity
from hpc_mp.base.text import counted, memory_size
from hpc_mp.cluster.node.gpu_use import Holder, Holders, read_holders
from hpc_mp.cluster.node.nvidia_smi import GpuReport
from hpc_mp.doctor.checks.check import Check, Judgement, or_well
from hpc_mp.doctor.checks.per_gpu import driver_error, row, says

IDLE_MEMORY_MIB = 1024  # allowed use without a program: memory of the driver and of a monitoring daemon


def mig(gpu: GpuReport) -> Judgement | None:
    now, soon = says(gpu, "mig_mode/current_mig"), says(gpu, "mig_mode/pending_mig")
    if now != soon:
        return Judgement("warning", f"MIG is {now.lower()} and will be {soon.lower()} after a reset",
                         fix="reset the GPU, or set it back")
    if now != "Enabled":
        return None
    return Judgement("warning", "MIG is enabled: slices of one GPU cannot be joined to train a model")


def compute_mode(gpu: GpuReport) -> Judgement | None:
    mode = says(gpu, "compute_mode")
    if mode == "Prohibited":
        return Judgement("error", "compute mode Prohibited: no program may use this GPU")
    return None if mode == "Default" else Judgement("warning", f"compute mode {mode}: a second program on this GPU fails")


def leftovers(holders: Holders) -> Iterator[Judgement]:
    left = (ill._replace(message=f"process {holder.pid} ({holder.name}) {ill.message}", subject=holder.gpu)
            for holder in holders.holders if (ill := _left(holder, holders.slurm)))
    well = f"{counted(len(holders.holders), 'program')} on the GPUs, none left over" if holders.gpus else ""
    yield from or_well(left, well)


def _left(holder: Holder, slurm: bool) -> Judgement | None:
    if holder.state == "Z":
        return Judgement("error", "is dead and still holds the GPU", fix="reboot the node")
    if holder.state == "D":
        return Judgement("warning", "hangs in the kernel", fix="if it stays, reboot the node")
    return Judgement("warning", "belongs to no job of Slurm") if slurm and holder.is_job is False else None


def memory_held(holders: Holders) -> Iterator[Judgement]:
    busy = {holder.gpu for holder in holders.holders}
    severity: Severity = "unknown" if holders.hidden else "warning"
    why = "in use, by whom cannot be seen in a container" if holders.hidden else "in use and no program holds the GPU"
    held = [Judgement(severity, f"{memory_size(used * 2**20)} {why}", gpu) for gpu, used in holders.gpus
            if used > IDLE_MEMORY_MIB and gpu not in busy]
    failed = [Judgement("error", driver_error(message), gpu, "drain the node and reset the GPU, or reboot")
              for gpu, message in holders.failed]
    yield from or_well(held + failed, "no memory is in use without a program" if holders.gpus else "")


CHECKS = (
    row("gpu-mig", mig, "MIG is off", "warning unless: disabled, no change pending", "nvidia-smi -mig 0, then reset the GPU"),
    row("gpu-compute-mode", compute_mode, "compute mode Default", "Default; error: Prohibited", "nvidia-smi -c 0"),
    Check("gpu-leftover", read_holders, leftovers, "nvidia-smi --query-compute-apps, /proc/PID",
          "error unless: programs that hold a GPU belong to a job of Slurm", "end it, or drain the node and look at its epilog"),
    Check("gpu-memory-held", read_holders, memory_held, "nvidia-smi --query-gpu=memory.used",
          f"warning unless: no more than {memory_size(IDLE_MEMORY_MIB * 2**20)} in use without a program",
          "drain the node, then nvidia-smi --gpu-reset -i GPU"),
)
