"""Checks of the state of NVIDIA GPUs: clocks, power, temperature, modes, the processes that use them; errors of their memory."""

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


CLOCKS = checks_of_gpus({
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


# Limits of Azure's azurehpc-health-checks.
MOST_CORRECTED_SRAM = 10_000
MOST_DRAM = 20_000_000
MOST_REMAPPED_ROWS = 512
MOST_RETIRED_PAGES = 62  # of 64 entries in the GPU's table

PENDING = ("channel_repair_pending", "tpc_repair_pending")

# Names of error counters in drivers: (counters to add, counters to subtract). The first layout that a GPU has is used: one
# counter; parity and SECDED separately (since R555); before Ampere a total that includes the device's memory (DRAM).
_Layout = tuple[tuple[str, ...], tuple[str, ...]]
_SRAM_BAD: tuple[_Layout, ...] = ((("sram_uncorrectable",), ()), (("sram_uncorrectable_parity", "sram_uncorrectable_secded"), ()),
                                  (("double_bit/total",), ("double_bit/device_memory",)))
_SRAM_MENDED: tuple[_Layout, ...] = ((("sram_correctable",), ()), (("single_bit/total",), ("single_bit/device_memory",)))
_DRAM_BAD: tuple[_Layout, ...] = ((("dram_uncorrectable",), ()), (("double_bit/device_memory",), ()))
_DRAM_MENDED: tuple[_Layout, ...] = ((("dram_correctable",), ()), (("single_bit/device_memory",), ()))

REPLACE = "drain the node and have the GPU replaced"


def ecc_mode(gpu: GpuReport) -> Judgement | None:
    now, soon = says(gpu, "ecc_mode/current_ecc"), says(gpu, "ecc_mode/pending_ecc")
    if now != soon:
        return Judgement("warning", f"ECC is {now.lower()} and will be {soon.lower()} after a reboot",
                         fix="reboot, or set it back")
    if now == "Disabled":
        return Judgement("warning", "ECC is disabled: a flipped bit goes unnoticed into the result")
    return None


def sram(gpu: GpuReport) -> Judgement | None:
    uncorrected, lifetime = _count(gpu, "volatile", _SRAM_BAD), _count(gpu, "aggregate", _SRAM_BAD)
    corrected = _count(gpu, "volatile", _SRAM_MENDED)
    if uncorrected:
        return Judgement("error", f"{uncorrected:.0f} uncorrected errors of SRAM since the driver was loaded (allowed: 0)")
    if gpu.says("ecc_errors/aggregate/sram_threshold_exceeded") == "Yes":
        return Judgement("error", f"{lifetime:.0f} uncorrected errors of SRAM in its life, beyond its own limit", fix=REPLACE)
    if corrected > MOST_CORRECTED_SRAM:
        return Judgement("error", f"{corrected:.0f} corrected errors of SRAM, over {MOST_CORRECTED_SRAM}", fix=REPLACE)
    if lifetime:
        return Judgement("warning", f"{lifetime:.0f} uncorrected errors of SRAM in its life, none since the driver was loaded",
                         fix="watch this GPU; it says itself when it must be replaced")
    return None


def dram(gpu: GpuReport) -> Judgement | None:
    counts = {f"{since}/dram_{kind}": _count(gpu, since, layouts) for since in ("volatile", "aggregate")
              for kind, layouts in (("uncorrectable", _DRAM_BAD), ("correctable", _DRAM_MENDED))}
    worst = max(counts, key=lambda path: counts[path])
    if counts[worst] > MOST_DRAM:
        return Judgement("error", f"{counts[worst]:.0f} errors of DRAM ({worst}; over {MOST_DRAM})", fix=REPLACE)
    if uncorrected := counts["volatile/dram_uncorrectable"]:
        return Judgement("warning", f"{uncorrected:.0f} uncorrected errors of DRAM since the driver was loaded; what ran failed")
    return None


def row_remap(gpu: GpuReport) -> Judgement | None:
    rows = number(gpu, "remapped_rows/remapped_row_unc")
    if says(gpu, "remapped_rows/remapped_row_failure") == "Yes":
        return Judgement("error", f"remapping a row of memory failed ({rows:.0f} were remapped)", fix=REPLACE)
    if rows > MOST_REMAPPED_ROWS:
        return Judgement("error", f"{rows:.0f} rows remapped for uncorrected errors (over {MOST_REMAPPED_ROWS})", fix=REPLACE)
    if says(gpu, "remapped_rows/remapped_row_pending") == "Yes":
        # NVIDIA's "GPU memory error management": unaffected work may continue, and new work may start
        return Judgement("warning", f"a row waits to be remapped, which happens when the GPU is reset ({rows:.0f} were)")
    return None


def row_spare(gpu: GpuReport) -> Judgement | None:
    histogram = "remapped_rows/row_remapper_histogram/row_remapper_histogram"
    if f"{histogram}_none" not in gpu.values:
        raise NotApplicable  # a driver before 470, or a GPU without row remapping
    none, low = int(number(gpu, f"{histogram}_none")), int(number(gpu, f"{histogram}_low"))
    if none:
        return Judgement("warning",
                         f"{counted(none, 'bank')} of memory without spare rows: the next error there cannot be remapped")
    return Judgement("warning", f"{counted(low, 'bank')} of memory with few spare rows left") if low else None


def retired_pages(gpu: GpuReport) -> Judgement | None:
    pages = sum(number(gpu, f"retired_pages/{kind}/retired_count")
                for kind in ("multiple_single_bit_retirement", "double_bit_retirement"))
    if pages >= MOST_RETIRED_PAGES:
        return Judgement("error", f"{pages:.0f} retired pages (the table holds 64)", fix=REPLACE)
    if "Yes" in (gpu.says("retired_pages/pending_retirement"), gpu.says("retired_pages/pending_blacklist")):
        return Judgement("warning",
                         f"a page waits to be retired, which happens when the driver is loaded anew ({pages:.0f} were)")
    return None


def repair(gpu: GpuReport) -> Judgement | None:
    bad, *pending = (gpu.says(f"ecc_errors/{path}") for path in ("unrepairable_memory", *PENDING))
    if not any((bad, *pending)):
        raise NotApplicable
    if bad == "Yes":
        return Judgement("error", "the GPU says that its memory cannot be repaired", fix=REPLACE)
    waits = [path.replace("_", " ") for path, word in zip(PENDING, pending, strict=True) if word == "Yes"]
    return Judgement("warning", f"{' and '.join(waits)}: done when the GPU is reset") if waits else None


def _count(gpu: GpuReport, since: str, layouts: tuple[_Layout, ...]) -> float:
    """Return the error count. Raises Unavailable, or NotApplicable if errors are not counted: ECC absent or off, MIG mode."""
    if says(gpu, "ecc_mode/current_ecc") != "Enabled":
        raise NotApplicable
    prefix = f"ecc_errors/{since}/"
    for added, taken in layouts:
        if any(gpu.number(prefix + name) is not None for name in added):
            return sum(number(gpu, prefix + name) for name in added) - sum(gpu.number(prefix + name) or 0 for name in taken)
    return number(gpu, *(prefix + name for added, _ in layouts for name in added))


MEMORY = checks_of_gpus({
    "gpu-ecc-mode": ecc_mode,
    "gpu-ecc-sram": sram,
    "gpu-ecc-dram": dram,
    "gpu-row-remap": row_remap,
    "gpu-row-spare": row_spare,
    "gpu-retired-pages": retired_pages,
    "gpu-repair": repair,
})
