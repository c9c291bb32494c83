"""The kernel's log of GPUs: where it is read, and what its lines ask for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from case import rows
from machines.tree import broken

from hpc_mp.cluster.node.kernel_log import KernelMessage, read_kernel_log
from hpc_mp.cluster.node.source import NodeSource, Unavailable
from hpc_mp.cluster.node.xids import XIDS, blamed, sxid, xid
from hpc_mp.doctor.checks.kernel import xids


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


FATAL = "NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6)"
RECOVERY = "NVRM: Xid (PCI:0001:00:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
NVLINK = "NVRM: Xid (PCI:0001:00:00): 74, pid=1, NVLink: fatal error"
LONG = ("NVRM: The NVIDIA GPU 0000:18:00.0", "NVRM: (PCI ID: 10de:2901) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.")


@pytest.mark.parametrize(("lines", "gpu", "words"), [
    ([NVLINK] * 400, "0001:00:00", "400 times"),
    ([NVLINK, "NVRM: Xid (PCI:0001:00:00): 45, pid=1, name=a, Ch 00000001 caused by previous Xid 74"], "0001:00:00", "Xid 74"),
    # not covered by later harmless lines of the same number
    ([FATAL, FATAL.replace("Fatal", "Nonfatal"), RECOVERY, RECOVERY.replace("0x2 (Node Reboot Required)", "0x0 (None)")],
     "0008:01:00", "Xid 149"),
    (LONG, "0000:18:00", "Xid 79"),
    ((LONG[0], *(f"{' ' * 15}{line}" for line in LONG[1:])), "0000:18:00", "Xid 79"),  # as dmesg prints it
    (["NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."],
     "0000:18:00", "Xid 79"),
], ids=["repeated", "echo", "harmless after it", "three lines", "dmesg", "twice"])
def test_one_fault_is_one_finding(lines: Sequence[str], gpu: str, words: str) -> None:
    (finding,) = xids([KernelMessage(60.0, line) for line in lines])
    assert (finding.severity, finding.subject) == ("error", f"GPU {gpu}")
    assert words in finding.message and "named by" not in finding.message


def test_sxid_severity_lines_repeat() -> None:
    assert sxid("nvidia-nvswitch0: SXid (PCI:0000:06:00.0): 20009, Severity 0 Engine instance 04 Sub-engine instance 00") is None
