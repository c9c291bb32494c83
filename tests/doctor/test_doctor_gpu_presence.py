"""GPUs and drivers that are missing or out of order, one by one."""

from __future__ import annotations

import re

from case import Case
from gpu_machines import APPS, SMI, USED, answer, findings, of, smi

from hpc_mp.doctor.checks.check import run
from hpc_mp.doctor.checks.registry import GPU as CHECKS
from tests.machines.tree import HANGS, broken

NDV5 = {bus: f"/sys/bus/pci/devices/{bus}" for bus in ("0001:00:00.0", "0003:00:00.0", "0008:00:00.0")}
LIST = "nvidia-smi --list-gpus"
ASKED = (SMI, LIST, "nvidia-smi nvlink -s", "nvidia-smi topo -m", "nvidia-smi topo -p2p n", USED, APPS)
LOST = "Unable to determine the device handle for GPU 0004:00:00.0: GPU is lost.  Reboot the system to recover this GPU\n"
# Beside an answer, from the drivers that number GPUs (R510 on) and those before
UNREACHED = ("Unable to determine the device handle for GPU3: 0004:00:00.0: Unknown Error\n",
             "Unable to determine the device handle for GPU 0004:00:00.0: GPU requires reset\n")


def seven(kind: str) -> str:
    """nvidia-smi's answer when it reaches all GPUs but the last."""
    return re.sub(r"(.*)<gpu id=.*</gpu>", r"\1", answer(kind, SMI), flags=re.DOTALL)


def amd(**changes: object) -> dict[str, object]:
    """Eight MI300X in a machine that has no other GPU."""
    bus = "/sys/bus/pci/devices/0000:{05,15,65,75,85,95,e5,f5}:00.0"
    files: dict[str, object] = {
        f"{bus}/vendor": "0x1002", f"{bus}/device": "0x74a1", f"{bus}/class": "0x120000",
                                f"{bus}/ras/umc_err_count": "ue: 0\nce: 3",
        "/sys/class/kfd/kfd/topology/nodes/{0..1}/properties": "cpu_cores_count 48\nsimd_count 0",
        "/sys/class/kfd/kfd/topology/nodes/{2..9}/properties": "cpu_cores_count 0\nsimd_count 1216",
        "/dev/dri/renderD{128,136,144,152,160,168,176,184}": "", "/sys/module/amdgpu/version": "6.7.0",
    }
    return files | changes


CASES = (
    Case("gpu-count", "ndv5", {NDV5["0008:00:00.0"]: None, "/proc/driver/nvidia/gpus/0008:00:00.0": None, "/dev/nvidia3": None,
                               LIST: "".join(answer("ndv5", LIST).splitlines(keepends=True)[1:])}, "error", "PCI bus 7"),
    Case("gpu-count", "p4d", {"/dev/nvidia5": None}, "error", "/dev/nvidia* 7"),
    Case("gpu-count", "p5", {LIST: "".join(answer("p5", LIST).splitlines(keepends=True)[:6])}, "error", "nvidia-smi 6"),
    *(Case("gpu-count", "p5", {LIST: words + "".join(answer("p5", LIST).splitlines(keepends=True)[1:])}, "error",
           f"nvidia-smi 7, /dev/nvidia* 8; {words.strip()}") for words in UNREACHED),
    Case("gpu-smi", "ndv4", {SMI: (15, LOST), USED: (15, answer("ndv4", USED) + LOST)}, "error", LOST.strip()),
    Case("gpu-count", "gb200", {LIST: 15}, "unknown", "nvidia-smi exited with 15"),
    *(Case("gpu-smi", "ndv5", {SMI: code}, outcome, evidence) for code, outcome, evidence in (
        (9, "error", "the driver is not loaded"), (15, "error", "fallen off the bus"), (14, "error", "infoROM is corrupt"),
        (18, "error",
         "versions do not match"), (8, "error", "power cables"), (10, "error", "interrupt"), (12, "error", "libnvidia-ml"),
        (4, "error", "may not use"), (16, "error", "requires a reset"), (17, "error", "control group"),
         (2, "unknown", "does not know the question"), (139, "error", "signal 11"),
        (-6, "error", "signal 6"), (77, "error", "without a known meaning"))),
    Case("gpu-smi", "p5", {SMI: None}, "error", "not on PATH"),
    *(Case("gpu-smi", "ndv4", dict.fromkeys(ASKED, (code, words)), "error", words.strip()) for code, words in (
        (15, LOST), (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"),
        (18, "Failed to initialize NVML: Driver/library version mismatch\n"),
        (255, "Failed to initialize NVML: Unknown Error\n"), (6, "No devices were found\n"))),
    *(Case("gpu-smi", "p5", {SMI: (code, f"{words}{seven('p5')}")}, "error", words.strip())
      for code in (0, 15) for words in UNREACHED),
    Case("gpu-smi", "p5", {SMI: seven("p5")}, "error", "8 GPUs are attached, 7 of them described"),
    Case("gpu-smi", "p5", {SMI: (14, answer("p5", SMI) + "WARNING: infoROM is corrupted at gpu 0000:53:00.0\n")}, "error",
         "WARNING: infoROM is corrupted at gpu 0000:53:00.0: a GPU's infoROM is corrupt"),
    Case("gpu-temperature", "ndv4",  # the rest of the answer counts
         {SMI: (14, smi("ndv4", 4, {"temperature/gpu_temp": "90 C"})[SMI] + "\nWARNING: infoROM is corrupted\n")},
         "error", "90 °C", also=("gpu-smi",)),
    Case("gpu-smi", "p5", {SMI: answer("p5", SMI) + "\nWARNING: infoROM is corrupted at gpu 0000:53:00.0\n"}, "error",
         "0000:53:00.0"),
    Case("gpu-driver", "ndv4", {"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.161.08": None,
                                "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.90.07": ""}, "error",
         "driver 535.161.08 runs, libnvidia-ml is 550.90.07"),
    Case("gpu-driver", "ndv4", {"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.161.08": None}, "unknown", "to compare with"),
    Case("gpu-driver", "ndv5", {"/proc/driver/nvidia/version": None, "/sys/module/nvidia/version": None}, "error",
         "no driver loaded"),
    Case("gpu-device-files", "gb200", {"/dev/nvidia-uvm": None}, "error", "no /dev/nvidia-uvm: CUDA cannot start"),
    Case("gpu-excluded", "p4d", {"/proc/driver/nvidia/gpus/0000:90:1c.0/information": ("Excluded:\t No", "Excluded:\t Yes")},
         "warning", "leave this GPU alone", "0000:90:1c.0"),
    Case("gpu-alike", "ndv5", smi("ndv5", 5, {"vbios_version": "96.00.30.00.01"}), "warning",
         "VBIOS 96.00.30.00.01, most others 96.00.74.00.01", "GPU 5"),
    Case("gpu-alike", "gb200", smi("gb200", 0, {"max_clocks/sm_clock": "1410 MHz"}), "warning", "greatest clock 1410 MHz",
         "GPU 0"),
    Case("gpu-answers", "p5", smi("p5", 3, {"gpu_power_readings/power_draw": "[Unknown Error]"}), "error", "power_draw", "GPU 3"),
    *(Case("gpu-answers", "ndv4", smi("ndv4", 3, dict.fromkeys(
        ("temperature/gpu_temp", "utilization/gpu_util", "remapped_rows/remapped_row_pending", "ecc_mode/current_ecc",
         "vbios_version", "clocks_event_reasons/clocks_event_reason_hw_slowdown"), words)),
        "error", f"the driver answers: {words}, for ", "GPU 3") for words in (
            "ERR!", "Unknown Error", "GPU requires reset", "GPU is lost", "GPU is lost.  Reboot the system to recover this GPU")),
    Case("gpu-recovery", "gb200", smi("gb200", 3, {"gpu_recovery_action": "Node Reboot"}), "error",
         "the driver wants: Node Reboot"),
    Case("gpu-recovery", "ndv4", smi("ndv4", 3, {"gpu_reset_status/reset_required": "Yes"}), "error", "GPU reset"),
    Case("gpu-recovery", "ndv4", smi("ndv4", 3, {"gpu_reset_status/drain_and_reset_recommended": "Yes"}), "warning", "GPU reset"),
    Case("gpu-amd", "ethernet", amd() | {"/sys/bus/pci/devices/0000:65:00.0/ras/umc_err_count": "ue: 2\nce: 3"}, "error",
         "2 uncorrected errors of umc", "0000:65:00.0"),
    Case("gpu-amd", "ethernet", {name: text for name, text in amd().items() if "amdgpu" not in name}, "error",
         "amdgpu is not loaded"),
    Case("gpu-amd", "ethernet", amd(**{"/sys/class/kfd/kfd/topology/nodes/9/properties": "simd_count 0"}), "warning",
         "ROCm can use 7"),
    Case("gpu-amd", "ethernet", amd(), "ok", "8 AMD GPUs, amdgpu 6.7.0"),
)


def test_a_job_that_may_use_two_of_eight_gpus_has_not_lost_six() -> None:
    inside = {"/proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0",
              LIST: "".join(answer("p5", LIST).splitlines(keepends=True)[:2])}
    found = findings(broken("p5", inside | {SMI: seven("p5")}))
    assert [finding.severity for finding in of(found, "gpu-count") + of(found, "gpu-smi")] == ["ok", "ok"]
    assert "may use 2 of 8" in of(found, "gpu-count")[0].message


def test_a_hanging_driver_is_incomplete_within_the_deadline() -> None:
    found = run(CHECKS, broken("ndv5", {SMI: HANGS}), deadline=10)
    assert {finding.severity for finding in of(found, "gpu-smi")} == {"unknown"}
    assert {finding.severity for finding in of(found, "gpu-bus")} == {"ok"}

