"""PCIe and the kernel's log of GPUs, broken one by one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from case import Case
from gpu_machines import answer, findings, of, smi

from hpc_mp.cluster.node.gpu_pci import read_gpus
from hpc_mp.cluster.node.kernel_log import KernelMessage, read_kernel_log
from hpc_mp.cluster.node.source import NodeSource, Unavailable
from hpc_mp.cluster.node.xids import XIDS, blamed, sxid, xid
from hpc_mp.doctor.checks.gpu_log import xids
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

SLOTS = "0000:{53,64,75,86,97,a8,b9,ca}:00.0"
NARROW = {pci(SLOTS, "current_link_width"): "8", f"/proc/driver/nvidia/gpus/{SLOTS}/information": "Model: \t Tesla T4"}

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
         "only to root"),
    Case("gpu-pcie-limited", "ndv5", logged(LIMITED), "warning", "8 lanes of 16", "0009:00:00.0"),
    Case("gpu-numa", "ndv5", {pci("0003:00:00.0", "numa_node"): "-1"}, "warning", "no NUMA node", "0003:00:00.0"),
    Case("gpu-numa", "gb200", {pci("{0008,0009,0018,0019}:01:00.0", "numa_node"): "-1"}, "unknown", "for any GPU"),
    # ---- kernel log -------------------------------------------------------------------------------------------------
    Case("gpu-xid", "ndv5", logged("NVRM: Xid (PCI:000a:00:00): 79, pid=4711, name=python, GPU has fallen off the bus."), "error",
         "Xid 79: the GPU has fallen off the bus; 1 min ago", "GPU 000a:00:00"),
    Case("gpu-xid", "p4d", logged("NVRM: Xid (PCI:0000:10:1c): 48, pid=1, Double Bit ECC Error", 86400 * 4), "warning",
         "4 d ago"),
    Case("gpu-xid", "ndv5", logged("NVRM: Xid (PCI:000a:00:00): 45, pid=7, name=a, Ch 00000001 caused by previous Xid 149"),
         "error", "Xid 149: NVLink error (NETIR), named by Xid 45; 1 min ago", "GPU 000a:00:00"),
    Case("gpu-xid", "p4d", logged("NVRM: Xid (PCI:0000:10:1c): 94, pid=1, Contained memory error"), "warning", "Xid 94"),
    Case("gpu-xid", "ndv5", logged(RECOVERY), "error", "the driver now requests: Node Reboot Required"),
    Case("gpu-sxid", "p4d", logged("nvidia-nvswitch3: SXid (PCI:0000:c0:1b.0): 20034, Fatal, Link 30 LTSSM Fault Up"), "error",
         "SXid 20034 (fatal): Link 30 LTSSM Fault Up", "nvswitch3 0000:c0:1b.0"),
    Case("gpu-sxid", "p4d", logged("nvidia-nvswitch0: SXid (PCI:0000:c0:18.0): 20009, Non-fatal, Link 04 RX Short Error Rate"),
         "warning", "SXid 20009 (not fatal)"),
    # ---- what is well -----------------------------------------------------------------------------------------------
    Case("gpu-pcie-speed", "ndv5", smi("ndv5", None, {f"{GEN}/current_link_gen": "1", "utilization/gpu_util": "0 %"}), "ok",
         "it says nothing but under load"),  # an idle GPU lowers its speed
    Case("gpu-pcie-width", "p5", NARROW, "ok", "8 GPUs with 8 lanes ea"),  # a T4 of a cloud, for all its life
    Case("gpu-pcie-width", "p5", NARROW | {pci("0000:86:00.0", "current_link_width"): "4"}, "error", "", "0000:86:00.0"),
    Case("gpu-xid", "ndv5", {}, "ok", "Xid 13 are programs' doing"),
)


def test_a_fault_that_repeats_is_one_finding() -> None:
    line = "NVRM: Xid (PCI:0001:00:00): 74, pid=1, NVLink: fatal error"
    log = "".join(f"4,{number},{NOW_US - 30_000_000 + number},-;{line}\n" for number in range(400))
    found = of(findings(broken("ndv5", {"/dev/kmsg": log})), "gpu-xid")
    assert len(found) == 1
    assert "400 times" in found[0].message


def test_an_echo_of_an_xid_in_the_log_is_no_second_finding() -> None:
    lines = ("74, pid=1, NVLink: fatal error", "45, pid=1, name=a, Ch 00000001 caused by previous Xid 74")
    log = "".join(f"4,{number},{NOW_US - 30_000_000 + number},-;NVRM: Xid (PCI:0001:00:00): {line}\n"
                  for number, line in enumerate(lines))
    found = of(findings(broken("ndv5", {"/dev/kmsg": log})), "gpu-xid")
    assert [(each.severity, "named by" in each.message) for each in found] == [("error", False)]


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


@pytest.mark.parametrize("words", ["-- No entries --\n", "-- Logs begin at Mon 2026-01-05 10:00:00 UTC. --\n-- No entries --\n",
                                   "-- Journal begins at Mon 2026-01-05 10:00:00 UTC, ends at now. --\n", ""])
def test_a_log_of_which_a_user_sees_nothing_is_not_well(words: str) -> None:
    journal, hidden = "journalctl -k -b --no-pager -o short-monotonic", {"/dev/kmsg": None, "dmesg": 1}
    with pytest.raises(Unavailable, match="journalctl: shows this user no messages"):
        read_kernel_log(broken("ndv5", hidden | {journal: words}))
    told = read_kernel_log(broken("ndv5", hidden | {journal: f"{words}[863940.000000] node1 kernel: one\n"}))
    assert [each.text for each in told] == ["one"]


def test_a_log_that_never_ends_is_not_waited_for(tmp_path: Path) -> None:
    """/dev/kmsg would wait for the next record; so does a pipe that somebody holds open for writing."""
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev/kmsg")
    pipe = os.open(tmp_path / "dev/kmsg", os.O_RDWR)
    os.write(pipe, b"6,1,1000000,-;one\n")
    assert [line.text for line in read_kernel_log(NodeSource(tmp_path))] == ["one"]
    os.close(pipe)


# What drivers from R470 to R590 write, and what NVIDIA's catalogue has as the immediate action.
LINES = (
    ("NVRM: Xid (PCI:0000:C6:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "0000:c6:00", 79, "reboot"),
    ("NVRM: Xid (0000:c6:00): 79, GPU has fallen off the bus.", "0000:c6:00", 79, "reboot"),
    ("NVRM: Xid (PCI:00000000:c6:00.0): 48, x", "0000:c6:00", 48, "reset"),
    ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 95, pid=71, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No", "0000:01:00", 95,
     "reset"),
    ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=71, Contained: CE User Channel (0x9). RST: No, D-RST: No", "0000:01:00", 94,
     "watch"),
    ("NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception", "0000:3b:00", 13, "program"),
    ("NVRM: Xid (PCI:0000:c6:00): 54, Auxiliary power is not connected", "0000:c6:00", 54, "seat"),
    *((f"NVRM: Xid (PCI:0000:c6:00): {number}, x", "0000:c6:00", number, "reset")
      for number in (46, 62, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 159)),
    *((f"NVRM: Xid (PCI:0000:c6:00): {number}, pid=1, name=x, Ch 1", "0000:c6:00", number, "program")
      for number in (8, 11, 31, 32, 43, 44, 45, 69, 72, 86, 99, 128, 137, 139, 141)),
    *((f"NVRM: Xid (PCI:0000:c6:00): {number}, x", "0000:c6:00", number, "watch") for number in (63, 92, 121, 157, 164)),
    *((f"NVRM: Xid (PCI:0000:c6:00): {number}, x", "0000:c6:00", number, "none") for number in (14, 106, 152, 160, 162)),
    *((f"NVRM: Xid (PCI:0000:c6:00): {number}, x", "0000:c6:00", number, "support") for number in (1, 57, 58, 78, 142, 167)),
    *((f"NVRM: Xid (PCI:0000:c6:00): {number}, ?", "0000:c6:00", number, "unknown") for number in (0, 173, 999)),
    ("NVRM: Xid (PCI:0000:c6:00): 151, x", "0000:c6:00", 151, "reboot"),
    # NVLink of the fifth generation, before and from R575 on: the text has the severity
    ("NVRM: Xid (PCI:0018:01:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226)", "0018:01:00", 149, "none"),
    ("NVRM: Xid (PCI:0018:01:00): 145, pid=7, name=a, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x04)", "0018:01:00", 145, "none"),
    ("NVRM: Xid (PCI:0008:01:00): 144, SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008)", "0008:01:00", 144, "none"),
    ("NVRM: Xid (PCI:0008:01:00): 146, TLW_RX/TLW_RX_PIPE0 Non-fatal XC1 i0 Link 0 (0x0000000a)", "0008:01:00", 146, "none"),
    ("NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6)", "0009:01:00", 149, "reset"),
    ("NVRM: Xid (PCI:0009:01:00): 150, MSE_WATCHDOG Fatal XC0 i0 Link -1 (0x00000000)", "0009:01:00", 150, "reset"),
    ("NVRM: Xid (PCI:0009:01:00): 147, TREX", "0009:01:00", 147, "reset"),
    ("NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "0009:01:00",
     154, "reset"),
    ("NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
     "0009:01:00", 154, "none"),
    # Xid 45 that names its cause
    ("NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=a, Ch 00000001 caused by previous Xid 149", "0000:dc:00", 149, "reset"),
    ("NVRM: Xid (PCI:0000:ed:00): 45, pid=1818992, name=a, Ch 0000000c caused by previous Xid 145", "0000:ed:00", 145, "reset"),
    ("NVRM: Xid (PCI:0000:ed:00): 45, pid=1, name=python3, Ch 0000000c caused by previous Xid 79", "0000:ed:00", 79, "reboot"),
    ("NVRM: Xid (PCI:0000:ed:00): 45, pid=1, name=python3, Ch 0000000c caused by previous Xid 31", "0000:ed:00", 31, "program"),
    ("NVRM: Xid (PCI:0000:ed:00): 45, pid=1, name=python3, Ch 0000000c caused by previous Xid 0", "0000:ed:00", 45, "program"),
    # words without a number
    ("NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.", "0000:29:00", 79, "reboot"),
    ("NVRM: GPU 29:00.0: GPU has fallen off the bus.", "0000:29:00", 79, "reboot"),
    (r"NVRM: The NVIDIA GPU 0000:18:00.0\x0aNVRM: (PCI ID: 10de:2901) installed in this system has\x0aNVRM: fallen off the bus "
     "and is not responding to commands.", "0000:18:00", 79, "reboot"),
    ("NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x62:0xffff:1863)", "0000:01:00", None, "reboot"),
    ("NVRM: RmInitAdapter failed! (0x27:0x38:1193)", "", None, "reboot"),
    ("NVRM: GPU 0000:01:00.0: rm_init_adapter failed, device minor number 0", "0000:01:00", None, "reboot"),
    ("NVRM: rm_init_adapter(0) failed", "", None, "reboot"),
    ("nvidia 0000:18:00.0: Unable to change power state from D3cold to D0, device inaccessible", "0000:18:00", None, "reboot"),
    ("nvidia 0000:18:00.0: can't change power state from D3cold to D0 (config space inaccessible)", "0000:18:00", None, "reboot"),
    ("NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062) returned from status @ "
     "kernel_channel.c:2827", "", None, "reset"),
    ("NVRM: nvCheckOkFailedNoLog: Check failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062)", "", None, "reset"),
    ("NVRM: GPU 0000:18:00.0: GspRmAlloc failed: Reset required [NV_ERR_RESET_REQUIRED]", "0000:18:00", None, "reset"),
    ("NVRM: GPU5 nvCheckOkFailedNoLog: Check failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F)", "", 79, "reboot"),
)


@pytest.mark.parametrize(("line", "bus", "number", "action"), LINES, ids=[line[:70] for line, *_ in LINES])
def test_what_a_line_asks_for(line: str, bus: str, number: int | None, action: str) -> None:
    entry = xid(line)
    assert entry is not None
    assert (entry.bus, entry.number, entry.action) == (bus, number, action)
    assert [entry] * (action in ("seat", "reset", "reboot", "replace")) == blamed([line])


@pytest.mark.parametrize("line", [
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.133.20", "NVRM: GPU at PCI:0000:03:00: GPU-b850f46d",
    "NVRM: GPU 0000:03:00.0: RmInitAdapter succeeded", "mlx5_core 0000:61:00.0: device inaccessible", "NVRM: Xid (invalid): 7"])
def test_lines_that_tell_of_no_error(line: str) -> None:
    assert xid(line) is None


def test_the_catalogue_has_every_number_up_to_its_last() -> None:
    assert sorted(XIDS) == list(range(1, 173))
    assert XIDS[64].action == "replace"


def test_an_error_is_not_covered_by_a_later_harmless_line_of_its_number() -> None:
    fatal = "NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6)"
    lines = [fatal, fatal.replace("Fatal", "Nonfatal"), RECOVERY, RECOVERY.replace("0x2 (Node Reboot Required)", "0x0 (None)")]
    told = list(xids([KernelMessage(60.0, line) for line in lines]))
    assert [(finding.severity, finding.subject) for finding in told] == [("error", "GPU 0008:01:00")]


@pytest.mark.parametrize("lines", [
    ("NVRM: The NVIDIA GPU 0000:18:00.0", "NVRM: (PCI ID: 10de:2901) installed in this system has",
     "NVRM: fallen off the bus and is not responding to commands."),
    ("NVRM: The NVIDIA GPU 0000:18:00.0", "               NVRM: (PCI ID: 10de:2901) installed in this system has",
     "               NVRM: fallen off the bus and is not responding to commands."),  # as dmesg prints it
    ("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.")])
def test_one_gpu_off_the_bus_is_one_finding(lines: Sequence[str]) -> None:
    told = list(xids([KernelMessage(60.0, line) for line in lines]))
    assert [(finding.severity, finding.subject) for finding in told] == [("error", "GPU 0000:18:00")]


def test_an_unknown_number_is_neither_well_nor_an_error() -> None:
    told = list(xids([KernelMessage(60.0, "NVRM: Xid (PCI:0000:18:00): 173, x")]))
    assert [(finding.severity, finding.message) for finding in told] == [
        ("unknown", "Xid 173: not in NVIDIA's catalogue; 1 min ago")]


def test_sxid_severity_lines_repeat() -> None:
    assert sxid("nvidia-nvswitch0: SXid (PCI:0000:06:00.0): 20009, Severity 0 Engine instance 04 Sub-engine instance 00") is None


def test_speeds_and_widths_are_read() -> None:
    gpu = read_gpus(tree("ndv5"))[0]
    assert (gpu.bus, gpu.vendor, gpu.device, gpu.speed, gpu.max_width,
            gpu.numa) == ("0001:00:00.0", "nvidia", "0x2330", 32.0, 16, 0)
