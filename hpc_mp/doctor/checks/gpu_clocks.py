"""Checks of clocks, power, temperature and modes of NVIDIA GPUs, and of the processes that use them."""

from collections.abc import Iterator

from hpc_mp.base.findings import Severity
from hpc_mp.base.text import counted, memory_size
from hpc_mp.cluster.node.gpu_driver import Holder, Holders, read_holders
from hpc_mp.cluster.node.nvidia_smi import GpuReport
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well
from hpc_mp.doctor.checks.per_gpu import NotApplicable, checks_of_gpus, driver_error, number, says

# Bits of NVML's clocks event reasons, by their names in nvidia-smi -q -x. Several may be set at once.
REASONS = {
    "gpu_idle": 0x1, "applications_clocks_setting": 0x2, "sw_power_cap": 0x4, "hw_slowdown": 0x8, "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80, "display_clocks_setting": 0x100,
}
SLOWED = 0x8 | 0x20 | 0x40 | 0x80  # 0xE8, as in Azure's cyclecloud-healthagent; sw_power_cap is normal under load
HALVED = 0x8 | 0x40 | 0x80  # slowed by the hardware to half the clock or less
HOTTEST = 93.0  # degrees C, used if the GPU reports no limit (Azure's azurehpc-health-checks)


def throttle(gpu: GpuReport) -> Judgement | None:
    mask = reasons(gpu)
    slowed = [name.replace("_", " ") for name, bit in REASONS.items() if mask & bit & SLOWED]
    if not slowed:
        return None
    return Judgement("error" if mask & HALVED else "warning", f"slowed down: {', '.join(slowed)} (event reasons {mask:#x})")


def reasons(gpu: GpuReport) -> int:
    """Return the mask of active event reasons. Raises NotApplicable or Unavailable."""
    says(gpu, *_paths("hw_slowdown"))
    return sum(bit for name, bit in REASONS.items() if gpu.says(*_paths(name)) == "Active")


def _paths(reason: str) -> tuple[str, str]:
    return f"clocks_event_reasons/clocks_event_reason_{reason}", f"clocks_throttle_reasons/clocks_throttle_reason_{reason}"


def application_clocks(gpu: GpuReport) -> Judgement | None:
    for kind in ("graphics", "mem"):
        current = number(gpu, f"applications_clocks/{kind}_clock")
        default = number(gpu, f"default_applications_clocks/{kind}_clock")
        if current < default:
            return Judgement("warning", f"{kind} clock set to {current:.0f} MHz, {default:.0f} by default")
    return None


def persistence(gpu: GpuReport) -> Judgement | None:
    if gpu.says("ecc_mode/current_ecc") is None:
        raise NotApplicable  # a desktop or laptop GPU: its display keeps the driver loaded
    if says(gpu, "persistence_mode") == "Enabled":
        return None
    return Judgement("warning",
                     "persistence mode is off: the driver shuts the GPU down between programs, and each start costs seconds")


def power_limit(gpu: GpuReport) -> Judgement | None:
    current = number(gpu, "gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit")
    default = number(gpu, "gpu_power_readings/default_power_limit", "power_readings/default_power_limit")
    return Judgement("warning", f"power limit {current:.0f} W, {default:.0f} W by default") if current < default else None


def temperature(gpu: GpuReport) -> Judgement | None:
    current = number(gpu, "temperature/gpu_temp")
    margin, slow_margin = gpu.number("temperature/gpu_temp_tlimit"), gpu.number("temperature/gpu_temp_slow_tlimit_threshold")
    if margin is not None and slow_margin is not None:  # since Hopper: degrees left, and the negative value at which it slows
        return Judgement("error", f"{current:.0f} °C, {margin:.0f} below its limit") if margin <= slow_margin else None
    limit = gpu.number("temperature/gpu_temp_slow_threshold") or HOTTEST
    return Judgement("error", f"{current:.0f} °C, slows down at {limit:.0f} °C") if current >= limit else None


def memory_temperature(gpu: GpuReport) -> Judgement | None:
    current = number(gpu, "temperature/memory_temp")
    margin = "temperature/gpu_temp_max_mem_tlimit_threshold"
    if gpu.says(margin) is not None:
        raise NotApplicable  # since Hopper: only a margin, without the memory's distance to it; see gpu-throttle
    limit = number(gpu, "temperature/gpu_temp_max_mem_threshold", margin)
    return Judgement("error", f"memory {current:.0f} °C, allowed {limit:.0f} °C") if current >= limit else None


CHECKS = checks_of_gpus({
    "gpu-throttle": throttle,
    "gpu-clocks": application_clocks,
    "gpu-persistence": persistence,
    "gpu-power-limit": power_limit,
    "gpu-temperature": temperature,
    "gpu-memory-temperature": memory_temperature,
})


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


USE = (
    *checks_of_gpus({"gpu-mig": mig, "gpu-compute-mode": compute_mode}),
    *checks_of(read_holders, {"gpu-leftover": leftovers, "gpu-memory-held": memory_held}),
)
