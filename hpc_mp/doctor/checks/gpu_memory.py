"""Checks of NVIDIA GPU memory: errors, remapped rows, retired pages."""

from hpc_mp.base.text import counted
from hpc_mp.cluster.node.nvidia_smi import GpuReport
from hpc_mp.doctor.checks.check import Judgement
from hpc_mp.doctor.checks.per_gpu import NotApplicable, checks_of_gpus, number, says

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


CHECKS = checks_of_gpus({
    "gpu-ecc-mode": ecc_mode,
    "gpu-ecc-sram": sram,
    "gpu-ecc-dram": dram,
    "gpu-row-remap": row_remap,
    "gpu-row-spare": row_spare,
    "gpu-retired-pages": retired_pages,
    "gpu-repair": repair,
})
