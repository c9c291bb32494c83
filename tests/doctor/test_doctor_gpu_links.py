"""What is read of GPUs, their links and the kernel's log of them; cards that have a bridge or none, and GPUs in MIG mode."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from case import findings, ills, of, rows
from edits import DARK, LINKS, MATRIX, PEERS, SMI, answer, dark, pairs, smi
from machines.tree import _commands, broken, tree

from hpc_mp.cluster.node.counters import Changes
from hpc_mp.cluster.node.gpu_links import link_counters, read_topology
from hpc_mp.cluster.node.gpu_pci import read_gpus
from hpc_mp.cluster.node.kernel_log import KernelMessage, read_kernel_log
from hpc_mp.cluster.node.nvidia_smi import address, parse_smi, read_load
from hpc_mp.cluster.node.source import NodeSource, Unavailable
from hpc_mp.cluster.node.xids import XIDS, blamed, sxid, xid
from hpc_mp.doctor.checks.gpu_nvlink import errors
from hpc_mp.doctor.checks.kernel import xids


def test_errors_that_grow_and_old_ones_that_do_not() -> None:
    names = [name for name, _ in link_counters(tree("ndv5"))]
    assert len(names) == 8 * 18 * 3
    assert names[0] == "nvlink/GPU 0 link 0 Replay Errors"
    assert [finding.severity for finding in errors(Changes(600.0, dict.fromkeys(names, 0), dict.fromkeys(names, 7)))] == ["ok"]
    grown = dict.fromkeys(names, 0) | {"nvlink/GPU 2 link 7 CRC Errors": 9, "nvlink/GPU 2 link 8 Recovery Errors": 1}
    found = list(errors(Changes(600.0, grown, grown)))
    assert [(finding.severity, finding.subject) for finding in found] == [("error", "GPU 2"), ("warning", "GPU 2")]
    assert "link 7 CRC Errors: 9 more within 10 min" in found[0].message


def test_counters_of_healthy_traffic_are_no_errors() -> None:
    """Blackwell counts code words by corrections (FEC bins), bucket 0 being the good ones."""
    names = {name.partition(" link ")[2].split(" ", 1)[1] for name, _ in link_counters(tree("gb200"))}
    assert names == {"Malformed packet Errors", "Buffer overrun Errors", "Rx Errors", "Rx remote Errors", "Rx General Errors",
                     "Local link integrity Errors", "Tx discards", "Link recovery failed events", "Effective Errors",
                     "Symbol Errors"}
    assert not list(link_counters(tree("ethernet")))


@pytest.mark.parametrize(("model", "rate"), [("RTX A6000", "14.062"), ("A100 80GB PCIe", "25"), ("H100 NVL", "26.562")])
def test_a_card_beside_two_on_a_bridge_is_no_error(model: str, rate: str) -> None:
    ways = f"{rate} GB/s", f"{rate} GB/s", "<inactive>"
    cards = "".join(f"GPU {gpu}: NVIDIA {model} (UUID: GPU-{gpu})\n" + "".join(f"\t Link {link}: {way}\n" for link in range(4))
                    for gpu, way in enumerate(ways))
    found = findings(broken("ndv5", {LINKS: cards}))
    assert [each.severity for each in of(found, "gpu-nvlink-down")] == ["warning"]
    assert all(each.severity == "ok" for each in of(found, "gpu-nvlink-rate"))


@pytest.mark.parametrize("status", [
    *("".join(f"GPU {gpu}: NVIDIA {model} (UUID: GPU-{gpu})\n\t Link 0: <inactive>\n\t Link 1: <inactive>\n" for gpu in (0, 1))
      for model in ("H100 PCIe", "H100 NVL", "H200 NVL", "RTX A6000")),
    f"GPU 0: NVIDIA GH200 480GB (UUID: GPU-0)\n{DARK}\n",
    "GPU 0: NVIDIA GH200 480GB (UUID: GPU-0)\nNVML: Unable to retrieve Nvlink information as all links are inActive\n",
    "GPU 0: NVIDIA GH200 480GB (UUID: GPU-0)\n" + "".join(f"\t Link {link}: <inactive>\n" for link in range(18)),
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\n\t NVML: Unable to retrieve NVLink information: Not Supported\n",
    "GPU 0: NVIDIA RTX A4000 (UUID: GPU-0)\nDevice does not have or support Nvlink\n"])
def test_cards_without_a_bridge_and_a_gpu_that_is_alone_need_no_nvlink(status: str) -> None:
    found = findings(broken("ndv4", {LINKS: status}))
    assert of(found, "gpu-nvlink-down") == [] == of(found, "gpu-nvlink-rate")


@pytest.mark.parametrize("gpus", [(5,), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_gpus_in_mig_mode_need_no_nvlink(gpus: tuple[int, ...]) -> None:
    ways = [["X" if one == other else "SYS" if {one, other} & set(gpus) else "NV18" for other in range(8)] for one in range(8)]
    reach = [[{"SYS": "NS", "NV18": "OK"}.get(way, way) for way in row] for row in ways]
    edits = smi("ndv5", None if len(gpus) == 8 else gpus[0], {"mig_mode/current_mig": "Enabled"}) | dark("ndv5", gpus)
    edits |= {**pairs(map(" ".join, ways)), PEERS: pairs(map(" ".join, reach))[MATRIX]}
    assert set(ills(findings(broken("ndv5", edits)))) == {"gpu-mig"}


def test_an_older_matrix_names_its_devices_in_the_head() -> None:
    text = ("\t\x1b[4mGPU0\tGPU1\tmlx5_0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV12\tPIX\t0-23\nGPU1\tNV12\t X \tSYS\t24-47\n"
            "mlx5_0\tPIX\tSYS\t X \t\n")
    told = read_topology(broken("ndv4", {MATRIX: text}))
    assert told is not None
    assert told.gpus == ("GPU0", "GPU1")
    assert told.nics == {"mlx5_0": "mlx5_0"}
    assert told.paths["GPU1", "mlx5_0"] == "SYS"


def test_speeds_and_widths_are_read() -> None:
    gpu = read_gpus(tree("ndv5"))[0]
    assert (gpu.bus, gpu.vendor, gpu.device, gpu.speed, gpu.max_width, gpu.numa) == (
        "0001:00:00.0", "nvidia", "0x2330", 32.0, 16, 0)


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
    for text, words in (("NVIDIA-SMI has failed because it couldn't communicate with the driver.", "no XML"),
                        ("<html></html>", "other XML")):
        with pytest.raises(Unavailable, match=words):
            parse_smi(text)
    assert [address(bus) for bus in ("00000000:C6:00.0", "00010000:01:00.0", "0008:01:00.0", "?")] == [
        "0000:c6:00.0", "10000:01:00.0", "0008:01:00.0", "?"]


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
