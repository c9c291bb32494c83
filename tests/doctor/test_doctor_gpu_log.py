"""The kernel's log of GPUs: where it is read, and what its lines ask for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from gpu_machines import findings, of
from machines.tree import broken
from rows import rows

from hpc_mp.cluster.node.kernel_log import KernelMessage, read_kernel_log
from hpc_mp.cluster.node.source import NodeSource, Unavailable
from hpc_mp.cluster.node.xids import XIDS, blamed, sxid, xid
from hpc_mp.doctor.checks.gpu_log import xids

NOW_US = 864_000_000_000  # uptime of the trees


RECOVERY = "NVRM: Xid (PCI:0001:00:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"


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


XID_LINES = [("" if bus == "-" else bus, None if number == "none" else int(number), action, line.replace("{}", number))
             for bus, numbers, action, line in rows(Path(__file__).with_name("xid_lines.txt"), 4) for number in numbers.split()]


@pytest.mark.parametrize(("bus", "number", "action", "line"), XID_LINES, ids=[line[:70] for *_, line in XID_LINES])
def test_what_a_line_asks_for(bus: str, number: int | None, action: str, line: str) -> None:
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
