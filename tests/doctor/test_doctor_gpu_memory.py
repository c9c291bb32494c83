"""Memory, clocks, power and temperature of GPUs, broken one by one."""

from __future__ import annotations

import pytest
from case import Case
from gpu_machines import findings, of, smi

from tests.machines.tree import Edit, broken

VOLATILE, AGGREGATE, ROWS = "ecc_errors/volatile", "ecc_errors/aggregate", "remapped_rows"
BANKS = f"{ROWS}/row_remapper_histogram/row_remapper_histogram"
EVENTS = "clocks_event_reasons/clocks_event_reason"
PAGES = {"retired_pages/multiple_single_bit_retirement/retired_count": "3",
         "retired_pages/double_bit_retirement/retired_count": "2",
         "retired_pages/pending_retirement": "No", "retired_pages/pending_blacklist": "No"}
# Errors as GPUs before Ampere count them: a P100 (no shared memory of textures, no CBU) and a V100
SRAM = ("sram_correctable", "sram_uncorrectable", "dram_correctable", "dram_uncorrectable")
UNITS = ("device_memory", "register_file", "l1_cache", "l2_cache", "texture_memory", "total")


def volta(gpu: int, units: tuple[str, ...] = (*UNITS, "texture_shm", "cbu"), **errors: int) -> dict[str, Edit]:
    """``errors``: such as ``volatile_double_bit_total``; all others are 0."""
    values: dict[str, str | None] = {f"{VOLATILE}/{name}": None for name in SRAM} | {f"{AGGREGATE}/{name}": None for name in SRAM}
    for since in ("volatile", "aggregate"):
        values |= {f"ecc_errors/{since}/{kind}/{unit}": str(errors.get(f"{since}_{kind}_{unit}", 0))
                   for kind in ("single_bit", "double_bit") for unit in units}
    return smi("ndv4", gpu, values)


MIG = {f"ecc_errors/volatile/{name}": "N/A" for name in SRAM}
# As drivers before 535 name them
OLD = {"clocks_event_reasons": None, "clocks_throttle_reasons/clocks_throttle_reason_hw_slowdown": "Not Active",
       "clocks_throttle_reasons/clocks_throttle_reason_sw_thermal_slowdown": "Active"}

CASES = (
    Case("gpu-ecc-mode", "ndv4", smi("ndv4", 3, {"ecc_mode/current_ecc": "Disabled", "ecc_mode/pending_ecc": "Disabled"}),
         "warning", "ECC is disabled", "GPU 3 (0004:00:00.0)"),
    Case("gpu-ecc-mode", "p5", smi("p5", 0, {"ecc_mode/pending_ecc": "Disabled"}), "warning", "will be disabled after a reboot",
         "GPU 0"),
    Case("gpu-ecc-sram", "ndv5", smi("ndv5", 2, {f"{VOLATILE}/sram_uncorrectable": "1"}), "error", "1 uncorrected errors of SRAM",
         "GPU 2 (0003:00:00.0)"),
    Case("gpu-ecc-sram", "gb200", smi("gb200", 1, {f"{VOLATILE}/sram_uncorrectable_parity": "2"}), "error",
         "2 uncorrected errors of SRAM", "GPU 1"),
    Case("gpu-ecc-sram", "gb200", smi("gb200", 1, {f"{AGGREGATE}/sram_uncorrectable_secded": "9",
                                                 f"{AGGREGATE}/sram_threshold_exceeded": "Yes"}), "error",
         "beyond its own limit"),
    Case("gpu-ecc-sram", "p4d", smi("p4d", 7, {f"{VOLATILE}/sram_correctable": "10001"}), "error", "10001 corrected errors",
         "GPU 7"),
    Case("gpu-ecc-sram", "p4d", smi("p4d", 7, {f"{AGGREGATE}/sram_uncorrectable": "4"}), "warning",
         "4 uncorrected errors of SRAM in its"),
    Case("gpu-ecc-dram", "ndv4", smi("ndv4", 5, {f"{AGGREGATE}/dram_correctable": "20000001"}), "error",
         "aggregate/dram_correctable"),
    Case("gpu-ecc-dram", "ndv4", smi("ndv4", 5, {f"{VOLATILE}/dram_uncorrectable": "1"}), "warning",
         "1 uncorrected errors of DRAM"),
    Case("gpu-ecc-dram", "ndv4", volta(3, volatile_double_bit_device_memory=2, volatile_double_bit_total=2), "warning",
         "2 uncorrected errors of DRAM", "GPU 3"),
    Case("gpu-ecc-dram", "ndv4", volta(3, UNITS, aggregate_single_bit_device_memory=20_000_001,
                                       aggregate_single_bit_total=20_000_001), "error", "20000001 errors of DRAM", "GPU 3"),
    Case("gpu-ecc-sram", "ndv4", volta(3, UNITS, volatile_double_bit_register_file=1, volatile_double_bit_total=1), "error",
         "1 uncorrected errors of SRAM since", "GPU 3"),
    Case("gpu-ecc-sram", "ndv4", volta(3, volatile_single_bit_l2_cache=10_001, volatile_single_bit_total=10_001), "error",
         "10001 corrected errors", "GPU 3"),
    Case("gpu-ecc-sram", "ndv4", volta(3, aggregate_double_bit_l2_cache=4, aggregate_double_bit_total=4), "warning",
         "4 uncorrected errors of SRAM in its life", "GPU 3"),
    Case("gpu-row-remap", "ndv5", smi("ndv5", 6, {f"{ROWS}/remapped_row_failure": "Yes"}), "error",
         "remapping a row of memory failed", "GPU 6"),
    Case("gpu-row-remap", "ndv5", smi("ndv5", 6, {f"{ROWS}/remapped_row_pending": "Yes"}), "warning",
         "a row waits to be remapped"),
    Case("gpu-row-remap", "p5", smi("p5", 6, {f"{ROWS}/remapped_row_unc": "513"}), "error", "513 rows remapped"),
    Case("gpu-row-spare", "ndh200v5", smi("ndh200v5", 4, {f"{BANKS}_none": "1 bank(s)"}), "warning",
         "1 bank of memory without spare"),
    Case("gpu-row-spare", "ndh200v5", smi("ndh200v5", 4, {f"{BANKS}_low": "2 bank(s)"}), "warning", "2 banks of memory with few"),
    Case("gpu-retired-pages", "ndv4", smi("ndv4", 0, PAGES | {"retired_pages/double_bit_retirement/retired_count": "60"}),
         "error", "63 retired pages", "GPU 0"),
    Case("gpu-retired-pages", "ndv4", smi("ndv4", 0, PAGES | {"retired_pages/pending_blacklist": "Yes"}), "warning",
         "a page waits to be retired"),
    Case("gpu-repair", "gb200", smi("gb200", 2, {"ecc_errors/channel_repair_pending": "Yes"}), "warning",
         "channel repair pending"),
    Case("gpu-repair", "gb200", smi("gb200", 2, {"ecc_errors/unrepairable_memory": "Yes"}), "error", "cannot be repaired"),
    # ---- clocks -----------------------------------------------------------------------------------------------------
    Case("gpu-throttle", "ndv5", smi("ndv5", 1, {f"{EVENTS}_hw_slowdown": "Active", f"{EVENTS}_hw_thermal_slowdown": "Active"}),
         "error", "hw slowdown, hw thermal slowdown (event reasons 0x49)", "GPU 1"),  # 0x1 is idle: a mask, no equality
    Case("gpu-throttle", "p5", smi("p5", 1, {f"{EVENTS}_sw_thermal_slowdown": "Active"}), "warning", "sw thermal slowdown"),
    Case("gpu-throttle", "p5", smi("p5", 1, {f"{EVENTS}_hw_power_brake_slowdown": "Active"}), "error", "hw power brake slowdown"),
    Case("gpu-throttle", "p4d", smi("p4d", 2, OLD), "warning", "sw thermal slowdown (event reasons 0x20)"),
    Case("gpu-clocks", "ndv4", smi("ndv4", 1, {"applications_clocks/graphics_clock": "1275 MHz"}), "warning",
         "1275 MHz, 1410 by default"),
    Case("gpu-persistence", "p4d", smi("p4d", None, {"persistence_mode": "Disabled"}), "warning", "persistence mode is off"),
    Case("gpu-power-limit", "ndh200v5", smi("ndh200v5", 3, {"gpu_power_readings/current_power_limit": "500.00 W"}), "warning",
         "500 W, 700 W by default", "GPU 3"),
    Case("gpu-temperature", "ndv4", smi("ndv4", 4, {"temperature/gpu_temp": "90 C"}), "error", "90 °C, slows down at 89 °C"),
    Case("gpu-temperature", "ndv5", smi("ndv5", 4, {"temperature/gpu_temp": "89 C", "temperature/gpu_temp_tlimit": "-2 C"}),
         "error", "89 °C, -2 below its limit"),
    Case("gpu-temperature", "p4d", smi("p4d", 4, {"temperature/gpu_temp": "93 C", "temperature/gpu_temp_slow_threshold": "N/A"}),
         "error", "slows down at 93 °C"),
    Case("gpu-memory-temperature", "p4d", smi("p4d", 4, {"temperature/memory_temp": "96 C"}), "error",
         "memory 96 °C, allowed 95"),
    # ---- what is well, or not told ----------------------------------------------------------------------------------
    Case("gpu-throttle", "ndv5",  # capped power is how a busy GPU works
         smi("ndv5", None, {f"{EVENTS}_sw_power_cap": "Active", f"{EVENTS}_gpu_idle": "Not Active"}), "ok", ""),
    Case("gpu-retired-pages", "ndv4", smi("ndv4", None, PAGES), "ok", "8 GPUs: few pages retired, none waits"),  # of a V100
    *(Case(code, "ndv4", edits, "ok", "") for code in ("gpu-ecc-sram", "gpu-ecc-dram") for edits in (
        volta(0), volta(0, UNITS), smi("ndv4", 0, MIG),
        volta(0, aggregate_single_bit_total=3, aggregate_single_bit_device_memory=3))),  # mended
    Case("gpu-ecc-mode", "ndv5", smi("ndv5", 2, {"ecc_mode": None}), "unknown", "", "GPU 2 (0003:00:00.0)"),
    Case("gpu-temperature", "ndv5", smi("ndv5", None, {"temperature/gpu_temp": "Unknown Error"}), "unknown", "",
         also=("gpu-answers",)),
)


@pytest.mark.parametrize("values", [{}, {"temperature/gpu_temp_max_mem_tlimit_threshold": "N/A"}, {
    "temperature/memory_temp": "N/A"}, {"temperature/gpu_temp_max_mem_tlimit_threshold": None,
                                        "temperature/gpu_temp_max_mem_threshold": "N/A"}])
def test_memory_of_a_hopper_has_a_margin_instead_of_a_limit(values: dict[str, str | None]) -> None:
    assert of(findings(broken("ndv5", smi("ndv5", None, values))), "gpu-memory-temperature") == []
