"""What the nodes of a survey say of themselves: equal findings together, how nodes differ, and which of it keeps a node out."""

import json
from dataclasses import asdict, replace

import pytest
from case import FaultTable
from machines.tree import broken, tree
from survey_paper import Faults, made

from hpc_mp.base.findings import Finding
from hpc_mp.doctor.compute import Result
from hpc_mp.doctor.drift import TRAITS, drift, traits
from hpc_mp.doctor.nccl_log.judge import judge_ports, read_port_bytes
from hpc_mp.doctor.node import diagnose
from hpc_mp.doctor.survey.agent import WARM_UPS, sent
from hpc_mp.doctor.survey.agents import read
from hpc_mp.doctor.survey.node_report import NodeReport, conclusions, faulty, node_report
from hpc_mp.doctor.survey.page import render
from hpc_mp.doctor.survey.report import findings

DOWN = Finding("fabric-port", "error", "mlx5_ib3 port 1", "state 1: DOWN", "look at its cable")
LIMIT = Finding("limit-memlock", "warning", "", "64 KiB", "raise it")
USUAL = traits(tree("ndv5"))
GPU = Result("", "cuda:0", "H100", "torch", {"matmul bf16": 600.0}, digests={"fp32": "a"})


def reports(count: int = 4, **odd: NodeReport) -> dict[str, NodeReport]:
    return {node: odd.get(node, NodeReport((LIMIT,), USUAL, (replace(GPU, host=node),)))
            for node in (f"n{number}" for number in range(count))}


def test_equal_findings_stand_together_and_the_gravest_first() -> None:
    found = conclusions(reports(n2=NodeReport((DOWN, LIMIT), USUAL)))
    assert [(noted.who, noted.nodes, noted.finding.code) for noted in found] == [
        ("n2", ("n2",), "fabric-port"), ("n[0-3]", ("n0", "n1", "n2", "n3"), "limit-memlock")]
    both = conclusions(reports(n2=NodeReport((DOWN, replace(DOWN, subject="mlx5_ib4 port 1")), USUAL)))
    assert both[0].finding.message == "mlx5_ib3 port 1: state 1: DOWN (and 1 more)"


def test_nodes_that_differ_are_named() -> None:
    found = conclusions(reports(n1=NodeReport((LIMIT,), traits(broken("ndv5", {"/proc/sys/kernel/osrelease": "6.1.0"})))))
    [drift] = [noted for noted in found if noted.finding.code.startswith("drift")]
    assert (drift.finding.code, drift.who, drift.nodes) == ("drift-kernel", "n1", ("n1",))


def test_a_device_that_computes_something_else_or_slowly_is_named() -> None:
    wrong = replace(GPU, host="n3", digests={"fp32": "b"})
    slow = replace(GPU, host="n1", rates={"matmul bf16": 300.0})
    some = reports(n3=NodeReport((), USUAL, (wrong,)), n1=NodeReport((), USUAL, (slow,)))
    found = {noted.finding.code: noted for noted in conclusions(some)}
    assert found["compute-unequal"].who == "n3 cuda:0" and found["compute-slow"].nodes == ("n1",)
    assert {node for node, _ in faulty(tuple(found.values()), 4)} == {"n1", "n3"}


def test_what_most_nodes_have_keeps_none_of_them_out() -> None:
    def kept_out(count: int) -> list[str]:
        report = made(Faults(reports={node: NodeReport((DOWN,), USUAL) for node in range(count)}))
        assert not report.sound and not report.diagnoses
        return [finding.node for finding in findings(report)]

    assert kept_out(2) == ["n0", "n1"] and kept_out(5) == []


def test_the_document_and_the_page_tell_it() -> None:
    report = made(Faults(reports={2: NodeReport((DOWN,), USUAL), 3: NodeReport((), USUAL)}))
    [check] = report.document()["checks"]
    assert check["nodes"] == ["n2"] and check["code"] == "fabric-port" and json.dumps(check)
    assert "state 1: DOWN" in render(report) and "nodes with errors" in render(report)
    assert made(Faults(reports={2: NodeReport((LIMIT,), USUAL)})).sound


def test_bytes_that_did_not_take_the_fast_network_are_found_once() -> None:
    order = {"size": 1 << 30, "messages": 5}
    ends = [{"rail": rail, "direction": direction, "rate": 1e9} for rail in (0, 1) for direction in (0, 1)]
    assert sent(ends, 2, order) == sent([], 2, order) == 2 * 2 * (5 + WARM_UPS) << 30  # on two GPUs, in two placements
    assert sent([{"rail": 0, "direction": 0, "why": "cut"}], 1, order) == 0
    still = read_port_bytes(tree("ndv4"))
    [error] = judge_ports(still, still, sent(ends, 2, order))
    assert (error.code, error.severity) == ("nccl-ports", "error")
    twice = NodeReport((LIMIT,), USUAL).and_also([error]).and_also([error])
    assert {*twice.findings} == {LIMIT, error} and len(twice.findings) == 2


def test_the_step_of_the_agent_itself_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one task; what it is granted is no fault of the node."""
    machine = broken("ndv5", {"/proc/self/environ": "SLURM_CPUS_ON_NODE=999\0"})
    assert "cgroup-cpus" in [finding.code for finding in diagnose(machine, ["cgroup-cpus"], 60) if finding.severity == "error"]
    monkeypatch.setattr("hpc_mp.doctor.survey.node_report.here", lambda: machine)
    assert "error" not in [finding.severity for finding in node_report("n1", 0.0).findings]


def test_this_machine_says_it_over_the_wire() -> None:
    seen = node_report("n7", 0.02)
    assert str(read(NodeReport, json.loads(json.dumps(asdict(seen))))) == str(seen)
    [result] = seen.results
    assert result.host == "n7" and not result.error and result.rates and result.digests
    assert "kernel" in seen.traits and all(finding.severity in ("error", "warning") for finding in seen.findings)


SAME = {"/etc/os-release": 'PRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
        "/proc/driver/nvidia/gpus/0001:00:00.0/information": "Model: \t\t NVIDIA H100\nVideo BIOS: \t 96.00.68.00.01\n"}
TABLE = FaultTable.read("faults.toml")


def test_nodes_that_are_alike_do_not_drift() -> None:
    found = list(drift({f"n{at}": traits(broken("ndv5", SAME)) for at in range(3)}))
    assert {(finding.code, finding.severity) for finding in found} == {(f"drift-{each}", "ok") for each in TRAITS}


@pytest.mark.parametrize("trait", [*TABLE.drift, "packages"])
def test_the_odd_node_is_named(trait: str) -> None:
    row = TABLE.drift.get(trait, {"says": "torch 2.7.0 on n3"})
    usual, odd = traits(broken("ndv5", SAME)), traits(broken("ndv5", SAME | TABLE.edits("ndv5", row)))
    if trait == "packages":
        odd = odd | {"packages": "torch 2.7.0"}
    found = [each for each in drift({"n0": usual, "n1": usual, "n2": usual, "n3": odd}) if each.severity != "ok"]
    assert [(each.code, each.subject) for each in found] == [(f"drift-{trait}", "n3")], found
    assert row["says"] in found[0].message


def test_of_two_nodes_that_differ_none_is_blamed_and_what_one_alone_shows_is_no_drift() -> None:
    found = [finding for finding in drift({"a": {"kernel": "1"}, "b": {"kernel": "2"}})]
    assert [(each.subject, each.message) for each in found] == [("", "release of the kernel: 1 on a; 2 on b")]
    assert list(drift({"a": {"kernel": "1"}, "b": {}})) == []
    assert "ports" not in traits(tree("ethernet"))
