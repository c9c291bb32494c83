"""Modes of GPUs, and programs left on them."""

from __future__ import annotations

import pytest
from case import Case
from gpu_machines import APPS, SMI, USED, answer, findings, smi

from hpc_mp.cluster.node.nvidia_smi import address, parse_smi, read_load
from hpc_mp.cluster.node.source import Unavailable
from tests.machines.tree import _commands, broken, tree

APP = "00000002:00:00.0, 777, /usr/bin/python3\n"
IN_JOB = "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0"
IN_SESSION = "0::/user.slice/user-1000.slice/session-3.scope"


def program(state: str, cgroup: str) -> dict[str, str]:
    return {APPS: APP, "/proc/777/status": f"Name:\tpython3\nState:\t{state} (x)\n", "/proc/777/cgroup": cgroup}


NO_SLURM = {path: "bash" for path in tree("ndv5").names("/proc/[0-9]*/comm") if tree("ndv5").text(path) == "slurmd"}

CASES = (
    Case("gpu-mig", "ndv4", smi("ndv4", 1, {"mig_mode/current_mig": "Enabled", "mig_mode/pending_mig": "Enabled"}), "warning",
         "MIG is enabled", "GPU 1"),
    Case("gpu-mig", "ndv4", smi("ndv4", 1, {"mig_mode/pending_mig": "Enabled"}), "warning", "will be enabled after a reset"),
    Case("gpu-compute-mode", "p5", smi("p5", 0, {"compute_mode": "Prohibited"}), "error", "no program may use this GPU", "GPU 0"),
    Case("gpu-compute-mode", "p5", smi("p5", 0, {"compute_mode": "Exclusive_Process"}), "warning", "a second program"),
    Case("gpu-leftover", "ndv5", program("S", IN_SESSION), "warning", "process 777 (python3) belongs to no job of Slurm",
         "GPU 1"),
    Case("gpu-leftover", "ndv5", program("Z", IN_JOB), "error", "is dead and still holds the GPU", "GPU 1 (0002:00:00.0)"),
    Case("gpu-leftover", "ndv5", program("D", IN_JOB), "warning", "hangs in the kernel"),
    Case("gpu-memory-held", "p4d", {USED: ("0000:20:1C.0, 4", "0000:20:1C.0, [GPU requires reset]")}, "error",
         "the driver answers: GPU requires reset", "GPU 2"),
    Case("gpu-memory-held", "p4d", {USED: answer("p4d", USED).replace("0000:20:1C.0, 4", "0000:20:1C.0, 30211")}, "warning",
         "29.5 GiB in use", "GPU 2"),
    Case("gpu-memory-held", "p4d",
         {USED: answer("p4d", USED).replace("0000:20:1C.0, 4", "0000:20:1C.0, 30211"), "/.dockerenv": ""},
         "unknown", "29.5 GiB in use"),
    *(Case(code, "ndv5", program("R", IN_JOB) | {USED: answer("ndv5", USED).replace("0002:00:00.0, 4", "0002:00:00.0, 70000")},
           "ok", says) for code, says in (("gpu-leftover", "1 program on the GPUs, none left over"), ("gpu-memory-held", ""))),
    Case("gpu-leftover", "ndv5", program("S", IN_SESSION) | NO_SLURM, "ok", ""),  # any program is somebody's
)


def test_load_is_read_from_new_and_old_drivers() -> None:
    load = read_load(tree("ndv5"))[3]
    assert (load.index, load.bus, load.clock, load.pcie, load.reasons) == (3, "0008:00:00.0", 1980.0, (5.0, 5.0, 16.0, 16.0), 0)
    new = next(argv for argv in _commands("ndv5") if "clocks_event_reasons" in argv)
    row = "0, 00000001:00:00.0, [N/A], 1980, 71.50, 31, 0, 5, 5, 16, 16, 0x00000000000000E8\n"
    old = read_load(broken("ndv5", {new: 2, new.replace("clocks_event_reasons", "clocks_throttle_reasons"): row}))
    assert [(gpu.clock, gpu.reasons) for gpu in old] == [(None, 0xE8)]


def test_nvidia_smi_in_xml() -> None:
    told = parse_smi(answer("gb200", SMI))
    assert (told.driver, told.attached, len(told.gpus), str(told.gpus[2])) == ("570.158.01", 4, 4, "GPU 2 (0018:01:00.0)")
    assert told.gpus[0].number("gpu_power_readings/current_power_limit") == 1200.0
    assert told.gpus[0].says("applications_clocks/graphics_clock") is None  # deprecated
    with pytest.raises(Unavailable, match="no XML"):
        parse_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    with pytest.raises(Unavailable, match="other XML"):
        parse_smi("<html></html>")
    assert [address(bus) for bus in ("00000000:C6:00.0", "00010000:01:00.0", "0008:01:00.0", "?")] == [
        "0000:c6:00.0", "10000:01:00.0", "0008:01:00.0", "?"]


def test_a_laptop_s_gpu_has_no_such_parts() -> None:
    """N/A is no fault and nothing unseen: the check says nothing."""
    parts = {"ecc_mode": "N/A", "ecc_errors": "N/A", "remapped_rows": "N/A", "retired_pages": "N/A", "mig_mode": "N/A",
             "fabric": "N/A",
             "persistence_mode": "Disabled", "applications_clocks": "N/A", "temperature/memory_temp": "N/A"}
    found = findings(broken("ndv5", smi("ndv5", None, parts)))
    silent = ("gpu-ecc-mode", "gpu-ecc-sram", "gpu-ecc-dram", "gpu-row-remap", "gpu-row-spare", "gpu-retired-pages", "gpu-mig",
              "gpu-fabric", "gpu-persistence", "gpu-clocks", "gpu-memory-temperature", "gpu-repair")
    assert not {finding.code for finding in found} & set(silent)
    assert {finding.severity for finding in found} == {"ok"}
