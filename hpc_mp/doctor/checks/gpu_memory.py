"""Memory of NVIDIA's GPUs: errors, rows remapped, pages retired."""

from __future__ import annotations

from hpc_mp.base.text import counted
from hpc_mp.cluster.node.nvidia_smi import GpuReport
from hpc_mp.doctor.checks.per_gpu import GpuFault, NotApplicable, number, row, says

# Limits of Azure's azurehpc-health-checks.
MOST_CORRECTED_SRAM = 10_000
MOST_DRAM = 20_000_000
MOST_REMAPPED_ROWS = 512
MOST_RETIRED_PAGES = 62  # of 64 that the GPU has room for

PENDING = ("channel_repair_pending", "tpc_repair_pending")

RESET = "drain the node, then nvidia-smi --gpu-reset -i GPU, or reboot"
REPLACE = "drain the node and have the GPU replaced"


def ecc_mode(gpu: GpuReport) -> GpuFault | None:
    now, soon = says(gpu, "ecc_mode/current_ecc"), says(gpu, "ecc_mode/pending_ecc")
    if now != soon:
        return GpuFault("warning", f"ECC is {now.lower()} and will be {soon.lower()} after a reboot", "reboot, or set it back")
    if now == "Disabled":
        return GpuFault("warning", "ECC is disabled: a flipped bit goes unnoticed into the result")
    return None


def sram(gpu: GpuReport) -> GpuFault | None:
    _counts(gpu)
    uncorrected, lifetime = _sram_uncorrected(gpu, "volatile"), _sram_uncorrected(gpu, "aggregate")
    corrected = number(gpu, "ecc_errors/volatile/sram_correctable")
    if uncorrected:
        return GpuFault("error", f"{uncorrected:.0f} uncorrected errors of SRAM since the driver was loaded (allowed: 0)")
    if gpu.says("ecc_errors/aggregate/sram_threshold_exceeded") == "Yes":
        return GpuFault("error", f"{lifetime:.0f} uncorrected errors of SRAM in its life, beyond its own limit", REPLACE)
    if corrected > MOST_CORRECTED_SRAM:
        return GpuFault("error", f"{corrected:.0f} corrected errors of SRAM, over {MOST_CORRECTED_SRAM}", REPLACE)
    if lifetime:
        return GpuFault("warning", f"{lifetime:.0f} uncorrected errors of SRAM in its life, none since the driver was loaded",
                   "watch this GPU; it says itself when it must be replaced")
    return None


def dram(gpu: GpuReport) -> GpuFault | None:
    _counts(gpu)
    counts = {path: number(gpu, f"ecc_errors/{path}") for path in (
        "volatile/dram_uncorrectable", "volatile/dram_correctable", "aggregate/dram_uncorrectable", "aggregate/dram_correctable")}
    worst = max(counts, key=lambda path: counts[path])
    if counts[worst] > MOST_DRAM:
        return GpuFault("error", f"{counts[worst]:.0f} errors of DRAM ({worst}; over {MOST_DRAM})", REPLACE)
    if uncorrected := counts["volatile/dram_uncorrectable"]:
        return GpuFault("warning", f"{uncorrected:.0f} uncorrected errors of DRAM since the driver was loaded; what ran failed")
    return None


def row_remap(gpu: GpuReport) -> GpuFault | None:
    rows = number(gpu, "remapped_rows/remapped_row_unc")
    if says(gpu, "remapped_rows/remapped_row_failure") == "Yes":
        return GpuFault("error", f"remapping a row of memory failed ({rows:.0f} were remapped)", REPLACE)
    if rows > MOST_REMAPPED_ROWS:
        return GpuFault("error", f"{rows:.0f} rows remapped for uncorrected errors (over {MOST_REMAPPED_ROWS})", REPLACE)
    if says(gpu, "remapped_rows/remapped_row_pending") == "Yes":
        # NVIDIA's "GPU memory error management": work that is not hit may go on, and new work may start
        return GpuFault("warning", f"a row waits to be remapped, which happens when the GPU is reset ({rows:.0f} were)")
    return None


def row_spare(gpu: GpuReport) -> GpuFault | None:
    histogram = "remapped_rows/row_remapper_histogram/row_remapper_histogram"
    if f"{histogram}_none" not in gpu.values:
        raise NotApplicable  # a driver before 470, or a GPU without rows
    none, low = int(number(gpu, f"{histogram}_none")), int(number(gpu, f"{histogram}_low"))
    if none:
        return GpuFault("warning", f"{counted(none, 'bank')} of memory without spare rows: "
                                   "the next error there cannot be remapped")
    return GpuFault("warning", f"{counted(low, 'bank')} of memory with few spare rows left") if low else None


def retired_pages(gpu: GpuReport) -> GpuFault | None:
    pages = sum(number(gpu, f"retired_pages/{kind}/retired_count")
                for kind in ("multiple_single_bit_retirement", "double_bit_retirement"))
    if pages >= MOST_RETIRED_PAGES:
        return GpuFault("error", f"{pages:.0f} retired pages (the table holds 64)", REPLACE)
    if "Yes" in (gpu.says("retired_pages/pending_retirement"), gpu.says("retired_pages/pending_blacklist")):
        return GpuFault("warning", f"a page waits to be retired, which happens when the driver is loaded anew ({pages:.0f} were)")
    return None


def repair(gpu: GpuReport) -> GpuFault | None:
    bad, *pending = (gpu.says(f"ecc_errors/{path}") for path in ("unrepairable_memory", *PENDING))
    if not any((bad, *pending)):
        raise NotApplicable
    if bad == "Yes":
        return GpuFault("error", "the GPU says that its memory cannot be repaired", REPLACE)
    waits = [path.replace("_", " ") for path, word in zip(PENDING, pending, strict=True) if word == "Yes"]
    return GpuFault("warning", f"{' and '.join(waits)}: done when the GPU is reset") if waits else None


def _counts(gpu: GpuReport) -> None:
    """Raises NotApplicable where errors are not counted: no ECC, or switched off."""
    if says(gpu, "ecc_mode/current_ecc") != "Enabled":
        raise NotApplicable


def _sram_uncorrected(gpu: GpuReport, since: str) -> float:
    """One count in older drivers; in newer ones errors found by parity, and those found by the code that also corrects."""
    whole = gpu.number(f"ecc_errors/{since}/sram_uncorrectable")
    if whole is not None:
        return whole
    return sum(number(gpu, f"ecc_errors/{since}/sram_uncorrectable_{kind}") for kind in ("parity", "secded"))


CHECKS = (
    row("gpu-ecc-mode", ecc_mode, "ECC is enabled",
        "warning unless: enabled, and no change pending", "nvidia-smi --ecc-config=1, then reboot"),
    row("gpu-ecc-sram", sram, "no uncorrected error of SRAM",
        f"error: any since the driver was loaded, over {MOST_CORRECTED_SRAM} corrected ones, or the GPU's own limit", RESET),
    row("gpu-ecc-dram", dram, "no uncorrected error of DRAM since the driver was loaded", f"error: over {MOST_DRAM}",
        "see gpu-row-remap and gpu-xid: the GPU replaces such rows by itself"),
    row("gpu-row-remap", row_remap, "no row failed to be remapped or waits for it", "error: failure; warning: pending", RESET),
    row("gpu-row-spare", row_spare, "spare rows in every bank of memory", "warning: few or none left in a bank",
        "plan to have the GPU replaced"),
    row("gpu-retired-pages", retired_pages, "few pages retired, none waits", f"error: {MOST_RETIRED_PAGES} or more", RESET),
    row("gpu-repair", repair, "no repair pending", "error: unrepairable memory; warning: a repair pending", RESET),
)
