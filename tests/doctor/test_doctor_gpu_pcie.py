"""PCIe and the kernel's log of GPUs, broken one by one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu_machines import Case, answer, findings, of, smi

from hpc_mp.cluster.node.gpu_pci import read_gpus
from hpc_mp.cluster.node.kernel_log import read_kernel_log
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.cluster.node.xids import XIDS, blamed, sxid, xid
from tests.machines.tree import broken, tree

GEN = "pci/pci_gpu_link_info/pcie_gen"
LSPCI = "lspci -D -vv -d 10de:"
NOW_US = 864_000_000_000  # uptime of the trees


def pci(bus: str, name: str) -> str:
    return f"/sys/bus/pci/devices/{bus}/{name}"


def logged(text: str, seconds_ago: float = 60.0) -> dict[str, str]:
    """The kernel's log with this line."""
    return {"/dev/kmsg": f"4,901,{NOW_US - int(seconds_ago * 1e6)},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0001:00:00.0\n"}


LIMITED = ("pci 0009:00:00.0: 252.048 Gb/s available PCIe bandwidth, limited by 32.0 GT/s PCIe x8 link at 0009:00:00.0 "
           "(capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)")
RECOVERY = "NVRM: Xid (PCI:0001:00:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"

CASES = (
    Case("gpu-bus", "ndv5",
         {pci("0002:00:00.0", "current_link_width"): "63", pci("0002:00:00.0", "current_link_speed"): "Unknown"},
         "error", "fallen off the bus", "0002:00:00.0"),
    Case("gpu-pcie-width", "p5", {pci("0000:86:00.0", "current_link_width"): "8"}, "error", "8 lanes of 16", "0000:86:00.0"),
    Case("gpu-pcie-width", "ndv4", {pci("{0001,0002,0003,0004,000b,000c,000d,000e}:00:00.0", "max_link_width"): "0"},
         "unknown", "no link width"),
    Case("gpu-pcie-speed", "p5", smi("p5", 1, {f"{GEN}/current_link_gen": "1", "utilization/gpu_util": "97 %"}), "error",
         "PCIe 1 of 5 while 97 % busy", "GPU 1"),
    Case("gpu-pcie-speed", "p5", smi("p5", 1, {f"{GEN}/max_link_gen": "4"}), "warning", "the slot allows PCIe 4", "GPU 1"),
    Case("gpu-pcie-replay", "p4d", smi("p4d", 6, {"pci/replay_counter": "2000000"}), "error", "139 a minute", "GPU 6"),
    Case("gpu-pcie-payload", "p4d",
         {LSPCI: answer("p4d", LSPCI).replace("MaxPayload 256 bytes, MaxReadReq", "MaxPayload 128 bytes, MaxReadReq", 1)},
         "warning", "MaxPayload 128 bytes; most have 256", "0000:10:1c.0"),
    Case("gpu-pcie-payload", "p5", {LSPCI: "0000:53:00.0 3D controller: NVIDIA\n\tCapabilities: <access denied>\n"}, "unknown",
         "it does to root only"),
    Case("gpu-pcie-limited", "ndv5", logged(LIMITED), "warning", "8 lanes of 16", "0009:00:00.0"),
    Case("gpu-numa", "ndv5", {pci("0003:00:00.0", "numa_node"): "-1"}, "warning", "no NUMA node", "0003:00:00.0"),
    Case("gpu-numa", "gb200", {pci("{0008,0009,0018,0019}:01:00.0", "numa_node"): "-1"}, "unknown", "for any GPU"),
    # ---- kernel log -------------------------------------------------------------------------------------------------
    Case("gpu-xid", "ndv5", logged("NVRM: Xid (PCI:000a:00:00): 79, pid=4711, name=python, GPU has fallen off the bus."), "error",
         "Xid 79: the GPU has fallen off the bus; 1 min ago", "GPU 000a:00:00"),
    Case("gpu-xid", "p4d", logged("NVRM: Xid (PCI:0000:10:1c): 48, pid=1, Double Bit ECC Error", 86400 * 4), "warning",
         "4 d ago"),
    Case("gpu-xid", "p4d", logged("NVRM: Xid (PCI:0000:10:1c): 94, pid=1, Contained memory error"), "warning", "Xid 94"),
    Case("gpu-xid", "ndv5", logged(RECOVERY), "error", "the driver now wants: Node Reboot Required"),
    Case("gpu-sxid", "p4d", logged("nvidia-nvswitch3: SXid (PCI:0000:c0:1b.0): 20034, Fatal, Link 30 LTSSM Fault Up"), "error",
         "SXid 20034 (fatal): Link 30 LTSSM Fault Up", "nvswitch3 0000:c0:1b.0"),
    Case("gpu-sxid", "p4d", logged("nvidia-nvswitch0: SXid (PCI:0000:c0:18.0): 20009, Non-fatal, Link 04 RX Short Error Rate"),
         "warning", "SXid 20009 (not fatal)"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_broken(case: Case) -> None:
    case.holds()


def test_an_idle_gpu_lowers_its_speed_and_is_well() -> None:
    idle = smi("ndv5", None, {f"{GEN}/current_link_gen": "1", "utilization/gpu_util": "0 %"})
    found = of(findings(broken("ndv5", idle)), "gpu-pcie-speed")
    assert [finding.severity for finding in found] == ["ok"]
    assert "it says nothing but under load" in found[0].message


def test_cards_in_narrow_slots_are_well_and_one_among_others_is_not() -> None:
    """A T4 of a cloud shows 8 lanes of 16 for all its life."""
    bus = "0000:{53,64,75,86,97,a8,b9,ca}:00.0"
    cards = {pci(bus, "current_link_width"): "8", f"/proc/driver/nvidia/gpus/{bus}/information": "Model: \t Tesla T4"}
    found = of(findings(broken("p5", cards)), "gpu-pcie-width")
    assert [(finding.severity, finding.message[:22]) for finding in found] == [("ok", "8 GPUs with 8 lanes ea")]
    found = of(findings(broken("p5", cards | {pci("0000:86:00.0", "current_link_width"): "4"})), "gpu-pcie-width")
    assert [(finding.severity, finding.subject) for finding in found] == [("error", "0000:86:00.0")]


def test_programs_errors_blame_no_gpu() -> None:
    found = of(findings(tree("ndv5")), "gpu-xid")
    assert [finding.severity for finding in found] == ["ok"]
    assert "Xid 13 are programs' doing" in found[0].message


def test_a_fault_that_repeats_is_one_finding() -> None:
    line = "NVRM: Xid (PCI:0001:00:00): 74, pid=1, NVLink: fatal error"
    log = "".join(f"4,{number},{NOW_US - 30_000_000 + number},-;{line}\n" for number in range(400))
    found = of(findings(broken("ndv5", {"/dev/kmsg": log})), "gpu-xid")
    assert len(found) == 1
    assert "400 times" in found[0].message


def test_the_log_is_read_from_wherever_it_may_be() -> None:
    line = "NVRM: Xid (PCI:0001:00:00): 79, x"
    told = read_kernel_log(broken("ndv5", {"/dev/kmsg": None, "dmesg": f"[863940.000000] {line}\n"}))
    assert [(round(each.age or 0), each.text) for each in told] == [(60, line)]
    told = read_kernel_log(broken("ndv5", {"/dev/kmsg": None, "dmesg": 1, "journalctl -k -b --no-pager -o short-monotonic":
                                           f"[863940.000000] node1 kernel: {line}\n"}))
    assert [each.text for each in told] == [line]
    told = read_kernel_log(broken("ndv5", {"/dev/kmsg": None, "dmesg": 1,
                                           "/var/log/kern.log": f"Nov 20 10:00:00 node1 kernel: {line}\n"}))
    assert [(each.age, each.text) for each in told] == [(None, f"Nov 20 10:00:00 node1 kernel: {line}")]


def test_a_log_that_never_ends_is_not_waited_for(tmp_path: Path) -> None:
    """/dev/kmsg would wait for the next record; so does a pipe that somebody holds open for writing."""
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev/kmsg")
    pipe = os.open(tmp_path / "dev/kmsg", os.O_RDWR)
    os.write(pipe, b"6,1,1000000,-;one\n")
    assert [line.text for line in read_kernel_log(NodeSource(tmp_path))] == ["one"]
    os.close(pipe)


def test_xids() -> None:
    assert xid("NVRM: Xid (PCI:0000:C6:00): 79, x") == xid("NVRM: Xid (0000:c6:00): 79, x")
    assert xid("NVRM: loading") is None
    assert (unknown := xid("NVRM: Xid (PCI:0000:c6:00): 999, ?")) and unknown.action == "program"
    calm = xid("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (Reset) to 0x0 (None)")
    assert calm and calm.action == "program"
    assert [entry.number for entry in blamed(["NVRM: Xid (PCI:0:1:0): 1", "NVRM: Xid (PCI:0000:01:00): 63, x",
                                              "NVRM: Xid (PCI:0000:01:00): 64, x"])] == [64]
    assert sxid("nvidia-nvswitch0: SXid (PCI:0000:06:00.0): 20009, Severity 0 Engine instance 04 Sub-engine instance 00") is None
    assert XIDS[79].action == "reboot"


def test_speeds_and_widths_are_read() -> None:
    gpu = read_gpus(tree("ndv5"))[0]
    assert (gpu.bus, gpu.vendor, gpu.device, gpu.speed, gpu.max_width,
            gpu.numa) == ("0001:00:00.0", "nvidia", "0x2330", 32.0, 16, 0)
