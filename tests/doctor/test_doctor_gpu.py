"""The GPU checks on healthy machines and on broken ones; and that every check has a healthy and a broken case."""

import re

import pytest
from case import CODES, GPU_KINDS, Case, FaultTable, findings, holds, ills, of
from edits import APPS, LINKS, LIST, MATRIX, PEERS, SMI, USED, answer, smi
from machines.tree import HANGS, broken, tree

from hpc_mp.doctor.checks.check import run
from hpc_mp.doctor.checks.registry import GPU as CHECKS

# Only where the part exists: rows or pages, pending repairs (new drivers), limits of memory (A100), IMEX (racks), AMD
SOMEWHERE_ELSE = {"gpu-retired-pages", "gpu-amd", "gpu-nvlink-errors"}
ASKED = (SMI, LIST, LINKS, MATRIX, PEERS, USED, APPS)
LOST = "Unable to determine the device handle for GPU 0004:00:00.0: GPU is lost.  Reboot the system to recover this GPU\n"
# Beside an answer, from the drivers that number GPUs (R510 on) and those before
UNREACHED = ("Unable to determine the device handle for GPU3: 0004:00:00.0: Unknown Error\n",
             "Unable to determine the device handle for GPU 0004:00:00.0: GPU requires reset\n")
CORRUPT = "WARNING: infoROM is corrupted at gpu 0000:53:00.0"
HOT = smi("ndv4", 4, {"temperature/gpu_temp": "90 C"})[SMI]  # beside a warning the rest of the answer counts


def seven(kind: str) -> str:
    """nvidia-smi's answer when it reaches all GPUs but the last."""
    return re.sub(r"(.*)<gpu id=.*</gpu>", r"\1", answer(kind, SMI), flags=re.DOTALL)


def listed(kind: str, first: int, end: int) -> str:
    return "".join(answer(kind, LIST).splitlines(keepends=True)[first:end])


# What is made of a whole answer of nvidia-smi; the other cases are rows of gpu_faults.toml.
ANSWERS = (
    Case("gpu-count", "ndv5", {"/sys/bus/pci/devices/0008:00:00.0": None, "/proc/driver/nvidia/gpus/0008:00:00.0": None,
                               "/dev/nvidia3": None, LIST: listed("ndv5", 1, 8)}, "error", "PCI bus 7"),
    Case("gpu-count", "p5", {LIST: listed("p5", 0, 6)}, "error", "nvidia-smi 6"),
    *(Case("gpu-count", "p5", {LIST: words + listed("p5", 1, 8)}, "error", f"nvidia-smi 7, /dev/nvidia* 8; {words.strip()}")
      for words in UNREACHED),
    Case("gpu-smi", "ndv4", {SMI: (15, LOST), USED: (15, answer("ndv4", USED) + LOST)}, "error", LOST.strip()),
    *(Case("gpu-smi", "ndv4", dict.fromkeys(ASKED, (code, words)), "error", words.strip()) for code, words in (
        (15, LOST), (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"),
        (18, "Failed to initialize NVML: Driver/library version mismatch\n"),
        (255, "Failed to initialize NVML: Unknown Error\n"), (6, "No devices were found\n"))),
    *(Case("gpu-smi", "p5", {SMI: (code, f"{words}{seven('p5')}")}, "error", words.strip())
      for code in (0, 15) for words in UNREACHED),
    Case("gpu-smi", "p5", {SMI: seven("p5")}, "error", "8 GPUs are attached, 7 of them described"),
    Case("gpu-smi", "p5", {SMI: (14, f"{answer('p5', SMI)}{CORRUPT}\n")}, "error", f"{CORRUPT}: a GPU's infoROM is corrupt"),
    Case("gpu-smi", "p5", {SMI: f"{answer('p5', SMI)}\n{CORRUPT}\n"}, "error", "0000:53:00.0"),
    Case("gpu-temperature", "ndv4", {SMI: (14, f"{HOT}\n{CORRUPT}\n")}, "error", "90 °C", also=("gpu-smi",)),
    *(Case("gpu-answers", "ndv4", smi("ndv4", 3, dict.fromkeys(
        ("temperature/gpu_temp", "utilization/gpu_util", "remapped_rows/remapped_row_pending", "ecc_mode/current_ecc",
         "vbios_version", "clocks_event_reasons/clocks_event_reason_hw_slowdown"), words)),
        "error", f"the driver answers: {words}, for ", "GPU 3") for words in (
            "ERR!", "Unknown Error", "GPU requires reset", "GPU is lost", "GPU is lost.  Reboot the system to recover this GPU")))
CASES = (*FaultTable.read("gpu_faults.toml").cases(), *ANSWERS)


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_a_healthy_machine_is_well(kind: str) -> None:
    found = findings(tree(kind))
    assert ills(found) == {}
    assert len({finding.code for finding in found}) >= 35


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_broken_is_named_and_what_is_unusual_is_well(case: Case) -> None:
    holds(case)


def test_every_check_is_well_somewhere_and_ill_somewhere() -> None:
    well = {finding.code for kind in GPU_KINDS for finding in findings(tree(kind)) if finding.severity == "ok"}
    assert set(CODES) - well <= SOMEWHERE_ELSE  # those have healthy cases of their own
    assert {case.code for case in CASES if case.outcome != "ok"} | {"gpu-nvlink-errors"} == set(CODES)
    assert len(CODES) == len(set(CODES)) >= 25


def test_no_gpu_no_words() -> None:
    assert findings(tree("ethernet")) == []


def test_a_job_that_may_use_two_of_eight_gpus_has_not_lost_six() -> None:
    inside = {"/proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", LIST: listed("p5", 0, 2)}
    found = findings(broken("p5", inside | {SMI: seven("p5")}))
    assert [finding.severity for finding in of(found, "gpu-count") + of(found, "gpu-smi")] == ["ok", "ok"]
    assert "may use 2 of 8" in of(found, "gpu-count")[0].message


def test_a_hanging_driver_is_incomplete_within_the_deadline() -> None:
    found = run(CHECKS, broken("ndv5", {SMI: HANGS}), deadline=10)
    assert {finding.severity for finding in of(found, "gpu-smi")} == {"unknown"}
    assert {finding.severity for finding in of(found, "gpu-bus")} == {"ok"}


@pytest.mark.parametrize("values", [{}, {"temperature/gpu_temp_max_mem_tlimit_threshold": "N/A"}, {
    "temperature/memory_temp": "N/A"}, {"temperature/gpu_temp_max_mem_tlimit_threshold": None,
                                        "temperature/gpu_temp_max_mem_threshold": "N/A"}])
def test_memory_of_a_hopper_has_a_margin_instead_of_a_limit(values: dict[str, str | None]) -> None:
    assert of(findings(broken("ndv5", smi("ndv5", None, values))), "gpu-memory-temperature") == []


def test_a_laptop_s_gpu_has_no_such_parts() -> None:
    """N/A is no fault and nothing unseen: the check says nothing."""
    parts: dict[str, str | None] = dict.fromkeys(
        ("ecc_mode", "ecc_errors", "remapped_rows", "retired_pages", "mig_mode", "fabric", "applications_clocks",
         "temperature/memory_temp"), "N/A")
    found = findings(broken("ndv5", smi("ndv5", None, parts | {"persistence_mode": "Disabled"})))
    silent = ("gpu-ecc-mode", "gpu-ecc-sram", "gpu-ecc-dram", "gpu-row-remap", "gpu-row-spare", "gpu-retired-pages", "gpu-mig",
              "gpu-fabric", "gpu-persistence", "gpu-clocks", "gpu-memory-temperature", "gpu-repair")
    assert not {finding.code for finding in found} & set(silent)
    assert {finding.severity for finding in found} == {"ok"}
