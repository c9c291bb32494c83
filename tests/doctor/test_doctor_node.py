"""Node checks, GPUs apart: on every healthy tree nothing is found, on every broken one exactly what was broken."""

from pathlib import Path
from typing import Any

import pytest
from case import Case, FaultTable, in_process, rows
from edits import earlier, logged
from machines.tree import HANGS, KINDS, broken, machine, tree
from tables import table

from hpc_mp.base.findings import Finding
from hpc_mp.cluster.node import mounts
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.doctor.checks import registry
from hpc_mp.doctor.checks.check import Check, run
from hpc_mp.doctor.checks.registry import PASSIVE

NODE: tuple[Check[Any], ...] = PASSIVE[len(registry.GPU):]
BY_CODE = {check.code: check for check in NODE}
REBUILT = [kind for kind in KINDS if kind != "here"]
FAULTS = FaultTable.read("faults.toml")
IB = FAULTS.names["IB"]
KERNEL_LINES = rows(Path(__file__).with_name("kernel_lines.txt"), 3)
ALL = (*(case for case in FAULTS.cases() if case.outcome != "ok"),
       *(Case(code, "ndv5", logged(line), severity, line[:20]) for code, severity, line in KERNEL_LINES if severity != "ok"))
PRAISED = [case for case in FAULTS.cases() if case.outcome == "ok"]
PLAIN = [Case(code, "ndv5", {}, "ok", "") for code in BY_CODE.keys() - {case.code for case in PRAISED}]


def looked(source: NodeSource, checks: tuple[Check[Any], ...]) -> list[Finding]:
    return run(checks, source, answers=in_process)


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity != "ok"]


@pytest.mark.parametrize("kind", REBUILT)
def test_nothing_is_wrong_with_a_healthy_machine(kind: str) -> None:
    assert bad(run(NODE, broken(kind, earlier(kind)), 120.0)) == []


@pytest.mark.parametrize("case", [*PRAISED, *sorted(PLAIN, key=str)], ids=str)
def test_a_healthy_machine_is_praised(case: Case) -> None:
    """Some for every check, and those that only look ill."""
    found = looked(broken(case.kind, case.edits), (BY_CODE[case.code],))
    assert {(finding.severity, finding.code, finding.fix) for finding in found} == {("ok", case.code, "")}, found


@pytest.mark.parametrize("fault", ALL, ids=[f"{fault.code}-{at}" for at, fault in enumerate(ALL)])
def test_a_broken_machine_is_found_out(fault: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    source, check = broken(fault.kind, fault.edits), (BY_CODE[fault.code],)
    if hangs := HANGS in fault.edits.values():
        monkeypatch.setattr(mounts, "_PATIENCE_S", 5.0)
    found = bad(run(check, source, 15.0) if hangs else looked(source, check))
    assert [finding.severity for finding in found].count(fault.outcome) == len(found) == fault.many, found
    assert fault.evidence in " | ".join(f"{finding.subject}: {finding.message}" for finding in found), found
    assert all(finding.code == fault.code and (finding.fix or finding.severity == "unknown") for finding in found)


@pytest.mark.parametrize("part", [pytest.param(part, marks=() if part == 0 else pytest.mark.prove) for part in range(8)])
def test_a_fault_sets_off_its_own_check_only(part: int) -> None:
    for fault in ALL[part::8]:
        if HANGS in fault.edits.values():
            continue
        source = broken(fault.kind, earlier(fault.kind) | dict(fault.edits))
        graver = {"error", "warning"} if fault.outcome != "unknown" else {"error"}
        others = {finding.code for finding in bad(looked(source, NODE)) if finding.severity in graver} - {fault.code}
        assert others <= set(fault.also), (fault.code, others)


def test_every_check_has_a_fault_and_says_what_it_reads_and_when_it_complains() -> None:
    codes = [check.code for check in PASSIVE]
    assert len(codes) == len(set(codes)) >= 60
    assert {fault.code for fault in ALL} == set(BY_CODE) and len(BY_CODE) >= 40
    assert all(check.reads and check.rule and (check.remedy or check not in NODE) for check in PASSIVE)


@pytest.mark.parametrize(("sets", "code"), [(("roce",), "fabric"), (("metal", "virtual-function"), "fabric-count")])
def test_roce_over_ipv4_and_a_virtual_function_without_a_device_are_well(sets: tuple[str, ...], code: str) -> None:
    source = broken("ndv5", FAULTS.edits("ndv5", {"sets": sets}))
    assert bad(looked(source, tuple(check for check in NODE if check.code.startswith(code)))) == []


def test_a_free_second_port_is_well_and_one_that_was_up_is_not() -> None:
    port = "/sys/class/infiniband/mlx5_0/ports"
    edits = {f"{port}/{{1,2}}/link_layer": "InfiniBand", f"{port}/{{1,2}}/state": "{4: ACTIVE,1: DOWN}",
             f"{port}/{{1,2}}/phys_state": "{5: LinkUp,2: Polling}", f"{port}/{{1,2}}/counters/link_downed": "0"}
    check = (BY_CODE["fabric-port"],)
    assert bad(looked(broken("ethernet", edits), check)) == []
    assert [finding.subject for finding in bad(looked(broken("ethernet", edits | {f"{port}/2/counters/link_downed": "1"}),
    check))] == \
        ["mlx5_0 port 2"]


def test_old_complaints_of_the_kernel_are_over() -> None:
    for ago, many in ((90_000.0, 0), (80_000.0, 1)):
        source = broken("ndv5", logged("{1}[Hardware Error]: event severity: fatal", ago))
        assert len(bad(looked(source, (BY_CODE["kernel-hardware"],)))) == many


@pytest.mark.parametrize("line", [line for _, severity, line in KERNEL_LINES if severity == "ok"])
def test_corrected_errors_and_a_missing_floppy_are_no_complaints(line: str) -> None:
    assert bad(looked(broken("ndv5", logged(line)), tuple(check for check in NODE if check.code.startswith("kernel-")))) == []


@pytest.mark.parametrize(("file", "line", "codes"), table(__file__, "doctor_node.toml", "no_kernel_lines"))
def test_a_line_that_the_kernel_does_not_write_is_named(file: str, line: str, codes: list[str]) -> None:
    source = broken("ndv5", {file: "\n".join(kept for kept in tree("ndv5").text(file).splitlines() if line not in kept)})
    unknown = [finding for code in codes for finding in looked(source, (BY_CODE[code],)) if finding.severity == "unknown"]
    assert [finding.code for finding in unknown] == codes
    assert {finding.message for finding in unknown} == {f"{file} of this kernel does not show {line}"}


SECOND_CARD = ("metal", "storage")  # a card for the storage with a fabric, a key and a free port of its own
NOBODYS = {f"{IB}/mlx5_9/device": {"link": "../../../bus/pci/devices/0103:00:00.2"}}
SUB_FUNCTION = {f"{IB}/mlx5_9/device": {"link": "../../../bus/pci/devices/0103:00:00.0/mlx5_core.sf.4"}}


@pytest.mark.parametrize(("sets", "edits", "wrong"), [
    (SECOND_CARD, {}, []),
    (SECOND_CARD, {f"{IB}/mlx5_21/ports/1/counters/link_downed": "1"}, ["mlx5_21 port 1"]),  # it was up
    (SECOND_CARD, {f"{IB}/mlx5_20/ports/1/state": "1: DOWN"}, ["mlx5_20 port 1", "mlx5_21 port 1"]),  # none of its ports is up
    (SECOND_CARD, {f"{IB}/mlx5_ib1/ports/1/pkeys/0": "0x8001"}, ["mlx5_ib1 port 1"]),  # of the fabric of the others
    (("metal", "virtual-function"), {}, []),  # that no driver has
    (("virtual-function", "idle"), NOBODYS, []),
    (("idle",), SUB_FUNCTION, [])])
def test_the_port_of_a_second_fabric_or_of_nobody_is_well(sets: tuple[str, ...], edits: dict[str, Any], wrong: list[str]) -> None:
    source = broken("ndv5", FAULTS.edits("ndv5", {"sets": sets}) | edits)
    checks = tuple(BY_CODE[code] for code in ("fabric-port", "fabric-partition", "fabric-rate", "fabric-gid"))
    assert sorted({finding.subject for finding in bad(looked(source, checks))}) == wrong


def test_an_adapter_at_the_same_switch_is_near_whatever_the_memory_node() -> None:
    up = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    edits = {"/sys/bus/pci/devices/{0001:00:00.0,0101:00:00.0}/numa_node": "{0,1}"}
    assert "GPU 0001:00:00.0" not in {finding.subject for finding in bad(looked(broken("ndv5", edits), (BY_CODE["nic-gpu"],)))}
    lonely = edits | {"/sys/bus/pci/devices/{0102,0103,0104}:00:00.0/numa_node": "1"}
    assert len(bad(looked(broken("ndv5", lonely), (BY_CODE["nic-gpu"],)))) == 4
    for address in ("0001:00:00.0", "0101:00:00.0"):
        lonely |= {f"/sys/bus/pci/devices/{address}": None, f"{up}/{address}/vendor": "0x10de" if address[1] == "0" else "0x15b3",
                   f"{up}/{address}/numa_node": "0" if address[1] == "0" else "1", f"{up}/{address}/class": "0x030200",
                   f"{up}/{address}/device": "0x2330"}
    source = broken("ndv5", lonely)
    for address in ("0001:00:00.0", "0101:00:00.0"):
        source.path(f"/sys/bus/pci/devices/{address}").symlink_to(source.path(f"{up}/{address}"))
    assert len(bad(looked(source, (BY_CODE["nic-gpu"],)))) == 3


def test_a_recorded_machine_says_what_it_said_when_it_was_there() -> None:
    found = {finding.code: finding.severity for finding in bad(run(PASSIVE, tree("here"), 120.0))}
    assert {code: outcome for code, outcome in found.items() if outcome != "unknown"} == dict.fromkeys(
        ("dns-own-name", "limit-nofile", "kernel-neighbours", "kernel-pids"), "warning")
    assert {code for code, outcome in found.items() if outcome == "unknown"} <= {
        "clock-sync", *(code for code in BY_CODE if code.startswith("kernel-"))}


def test_trees_say_where_they_are_from() -> None:
    assert {"ndv4", "ndv5", "ndh200v5", "p4d", "p5", "gb200", "ethernet"} <= set(KINDS)
    for kind in KINDS:
        assert machine(kind)["source"].startswith(("recorded", "rebuilt from documentation: ")), kind
        assert tree(kind).text("/proc/uptime")
