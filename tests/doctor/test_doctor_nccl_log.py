"""What NCCL's log tells, and what is said of it on which machine; nothing that stands in a log makes reading it fail, or slow."""

import functools
import time
import tomllib
from pathlib import Path

import pytest
from case import rows
from hypothesis import given, settings
from hypothesis import strategies as st
from machines.tree import broken, tree
from tables import table

from hpc_mp.base.findings import Finding
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.doctor.nccl_log.judge import Machine, judge, judge_ports, machine_of, read_port_bytes, refused
from hpc_mp.doctor.nccl_log.parse import NcclTruth, parse, trouble_rows

LOGS = Path(__file__).parents[1] / "nccl_logs"
IB = Machine("infiniband", 8, True)
P5 = Machine("efa", 32, True)
EXPECTED = tomllib.loads((LOGS / "expected.toml").read_text(encoding="utf-8"))


@functools.cache
def truth(name: str) -> NcclTruth:
    return parse((LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines())


def test_every_log_has_a_case() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_judged(name: str) -> None:
    fabric, ports = EXPECTED[name].get("machine", ["infiniband", 8])
    expected = {code: row for code, row in EXPECTED[name].items() if code != "machine"}
    found = list(judge(truth(name), Machine(fabric, ports, switched=True)))
    ill = [finding for finding in found if finding.severity != "ok"]
    assert {finding.code for finding in ill} == set(expected)
    for code, (outcome, subject, evidence) in expected.items():
        mine = [finding for finding in ill if finding.code == code]
        assert all(finding.severity == outcome and subject in finding.subject and finding.fix for finding in mine), mine
        assert evidence in mine[0].message
    assert any(finding.code == "nccl-network" for finding in found)


def test_healthy_on_infiniband() -> None:
    told = truth("ib-healthy")
    assert (told.networks, told.ranks, told.nodes) == ({"IB": 16}, 16, 2)
    assert told.adapters["hpc-pg0-0001"][7] == "mlx5_ib7:1/IB"
    assert told.gdr["mlx5_ib0"] is True
    assert told.hosts[16, 8] == "hpc-pg0-0002"
    network = [way for way in told.channels if told.between_nodes(way)]
    assert len(network) == 8  # a sender and a receiver say the same way
    assert all(way.gdr and way.how == "IB" for way in network)
    assert {way.device for way in network} == {0, 1, 2, 3}


def test_a_completion_names_both_ends() -> None:
    first, second = sorted((each for each in truth("ib-troubles").troubles if each.kind == "completion"),
                           key=lambda each: each.hca)
    assert (first.hca, first.rank, first.code) == ("mlx5_ib5", 5, 12)
    assert (second.hca, second.rank, second.code) == ("mlx5_ib6", 6, 12)  # as 2.21 writes it


@pytest.mark.parametrize(("line", "way"), table(__file__, "doctor_nccl_log.toml", "ways"))
def test_every_way_of_every_version(line: str, way: list[object]) -> None:
    told = parse([f"2: node7:11:12 [3] NCCL INFO {line}"])
    assert [[each.number, each.sender, each.receiver, each.via, each.how, "" if each.device is None else each.device, each.gdr]
            for each in told.channels] == [way]


OFI = "ncclResult_t nccl_net_ofi_init_v6(ncclDebugLogger_t)"
TROUBLES = rows(LOGS / "troubles.txt", 3)
MILD = {"event", "peer-gone", "warning"}


@pytest.mark.parametrize(("kind", "adapter", "line"), TROUBLES)
def test_what_ended_a_job_is_an_error_with_its_cause_and_a_remedy(kind: str, adapter: str, line: str) -> None:
    told = parse([f"[2026-01-01 10:00:00] 3: gpu1:77:78 [2] {line}"])
    (finding,) = [each for each in judge(told, Machine()) if each.severity != "unknown"]
    assert (finding.code, finding.subject) == (f"nccl-{kind}", f"gpu1 {adapter}".strip())
    assert finding.severity == ("warning" if kind in MILD else "error") and finding.fix
    assert line.partition("NCCL ")[2][5:].strip() in finding.message and ("page" in finding.fix) == (kind == "warning")


def test_every_kind_of_trouble_has_a_line() -> None:
    logged = {trouble.kind for trouble in truth("ib-troubles").troubles}
    assert set(trouble_rows()) == {kind for kind, _, _ in TROUBLES} | logged | {"ended"}


XML = "n1:1:2 [0] graph/xml.cc:99 NCCL WARN XML Parse : Unexpected EOF"


@pytest.mark.parametrize(("warning", "after", "ended"), table(__file__, "doctor_nccl_log.toml", "ended"))
def test_a_warning_is_an_error_if_it_ended_the_call(warning: str, after: list[str], ended: bool) -> None:
    told = [(each.code, each.severity) for each in judge(parse([warning, *after]), Machine())
            if each.code in ("nccl-ended", "nccl-warning")]
    assert told == [("nccl-ended", "error") if ended else ("nccl-warning", "warning")]


def test_what_ended_a_call_is_kept_behind_any_number_of_warnings() -> None:
    lines = [f"n1:1:2 [0] a.cc:1 NCCL WARN mild {number}" for number in range(300)]
    told = parse([*lines, "n1:1:2 [0] NCCL INFO Using network IB", XML, "n1:1:2 [0] NCCL INFO graph/topo.cc:493 -> 3"])
    assert [each.words for each in told.troubles if each.kind == "ended"] == ["XML Parse : Unexpected EOF"]


def test_connecting_again_is_no_trouble() -> None:
    lines = ["n1:1:2 [0] NCCL INFO Call to connect returned Connection refused, retrying",
             "n1:1:2 [0] NCCL INFO socketPollConnect: connect to n2<4> returned Connection refused, retrying (1/34) after 1 s",
             "n1:1:2 [0] NCCL INFO Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, "
             "retrying 1/3 after 100 msec of sleep"]
    assert parse(lines).troubles == ()


@pytest.mark.parametrize(("network", "machine", "severity"), [
    ("Socket", P5, "error"), ("", P5, "error"), ("Socket", Machine(), "warning"), ("", Machine(), "error"), ("IB", IB, None),
    ("Socket", IB, None), ("AWS Libfabric", P5, None)])
def test_a_plugin_that_did_not_start_matters_where_nothing_else_did(network: str, machine: Machine, severity: str | None) -> None:
    lines = [f"n1:1:2 [0] {OFI}:166 NCCL WARN NET/OFI Initializing plugin failed",
             *([f"n1:1:2 [0] NCCL INFO Using network {network}"] if network else [])]
    told = [finding.severity for finding in judge(parse(lines), machine) if finding.code == "nccl-ofi"]
    assert told == ([severity] if severity else [])


def test_the_reason_of_a_fall_back_to_sockets_is_told_once() -> None:
    lines = ["n0:1:2 [0] NCCL INFO NET/OFI No eligible providers were found",
             "n0:1:2 [0] int nccl_net_ofi_create_plugin(nccl_net_ofi_plugin_t**):259 NCCL WARN NET/OFI Unable to find a protocol",
             f"n0:1:2 [0] {OFI}:166 NCCL WARN NET/OFI Initializing plugin failed",
             "n0:1:2 [0] NCCL INFO Using network Socket"]
    ill = {finding.code: finding.message for finding in judge(parse(lines), P5) if finding.severity == "error"}
    assert set(ill) == {"nccl-network", "nccl-ofi"} and "No eligible providers were found; 3 such lines" in ill["nccl-ofi"]


@pytest.mark.parametrize("using", table(__file__, "doctor_nccl_log.toml", "adapters"))
def test_adapters_are_counted_merged_or_not(using: str) -> None:
    told = parse([f"n3:1:2 [0] NCCL INFO NET/IB : Using {using}", "n3:1:2 [0] NCCL INFO Using network IBext_v8"])
    assert sorted(told.adapters["n3"]) == [f"mlx5_{number}:1/RoCE" for number in range(4)]
    assert [each.severity for each in judge(told, Machine("roce", 4)) if each.code == "nccl-nics"] == ["ok"]
    (other,) = [each for each in judge(told, IB) if each.code == "nccl-nics"]
    assert "found 0 adapters of InfiniBand, and 4 others; the machine has 8 ports up" in other.message


def test_gpudirect_with_some_adapters_only_is_a_warning() -> None:
    lines = (LOGS / "one-rank-no-gdr.log").read_text(encoding="utf-8").replace("Disabled for HCA 3", "Enabled for HCA 3")
    ill = [finding for finding in judge(parse(lines.splitlines()), IB) if finding.severity != "ok"]
    assert [(finding.code, finding.severity) for finding in ill] == [("nccl-gdr", "warning")] and "7 of 8" in ill[0].message


def test_no_log_says_nothing_and_sockets_are_well_where_there_is_nothing_else() -> None:
    found = list(judge(parse(["epoch 1", "loss 2.3", "NCCL is a library"]), IB))
    assert [(finding.code, finding.severity) for finding in found] == [("nccl-network", "unknown")]
    assert {finding.severity for finding in judge(truth("ib-socket"), Machine())} == {"ok"}
    roce = {finding.code: finding.severity for finding in judge(truth("ib-socket"), Machine("roce", 2, True))}
    assert roce["nccl-network"] == "warning"  # an adapter that could do RoCE need not be meant to
    assert machine_of(tree("ethernet")) == Machine()


@pytest.mark.parametrize("kind", ["ndv4", "ndv5", "ndh200v5", "gb200", "p4d", "p5"])
def test_a_machine_with_a_fast_network_refuses_sockets(kind: str) -> None:
    """What launch asks: the machine's own files, and the log of a short run."""
    machine = machine_of(tree(kind))
    assert machine.fabric == ("efa" if kind.startswith("p") else "infiniband")
    assert [finding.code for finding in refused(judge(truth("ib-socket"), machine))] == ["nccl-network"]


def counters(kind: str, **sent: int) -> NodeSource:
    return broken(kind, {f"/sys/class/infiniband/{name}/ports/1/counters/port_xmit_data": str(count // 4) for name,
                         count in sent.items()})


def says(found: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.subject) for finding in found]


def test_bytes_of_the_ports_against_bytes_sent() -> None:
    before = read_port_bytes(tree("ndv4"))
    assert len(before) == 8
    each = {f"mlx5_ib{index}": 1_000_000_000 for index in range(8)}
    even = read_port_bytes(counters("ndv4", **each))
    assert even["mlx5_ib3 port 1"] == 1_000_000_000
    assert says(list(judge_ports(before, even, 8_000_000_000))) == [("ok", "")]
    lame = read_port_bytes(counters("ndv4", **each | {"mlx5_ib5": 100_000_000}))
    assert says(list(judge_ports(before, lame, 7_000_000_000))) == [("warning", "mlx5_ib5 port 1")]
    found = list(judge_ports(before, before, 8_000_000_000))  # it all went over Ethernet
    assert says(found) == [("error", "")]
    assert "0 B went through the fast ports, the ranks sent 8 GB" in found[0].message


def test_ports_that_cannot_be_compared() -> None:
    assert says(list(judge_ports({}, {}, 100))) == [("unknown", "")]
    reset = {"a port 1": 5}
    assert says(list(judge_ports({"a port 1": 9}, reset, 100))) == [("unknown", "")]
    assert says(list(judge_ports(reset, reset, 0))) == [("unknown", "")]


LINES = [line for path in sorted(LOGS.glob("*.log")) for line in path.read_text(encoding="utf-8").splitlines()]
WORDS = table(__file__, "doctor_nccl_log.toml", "words")
MACHINES = [Machine(), Machine("infiniband", 8, True), Machine("efa", 32, True), Machine("roce", 2, False)]


def survives(lines: list[str], machine: Machine) -> None:
    told = parse(lines)
    for finding in judge(told, machine):
        assert finding.message and finding.severity in ("ok", "warning", "error", "unknown")


ANY_BYTES = st.binary(max_size=2000).map(lambda data: (b"n:1:2 [0] NCCL WARN " + data).decode(errors="replace").splitlines())
ANY_WORDS = st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map("".join), max_size=12).map(
    lambda lines: [*(f"h:1:2 [0] NCCL INFO {line}" for line in lines), *lines])


@settings(max_examples=2 * settings.default.max_examples)
@given(st.one_of(st.lists(st.text(max_size=200), max_size=8), ANY_BYTES, ANY_WORDS), st.sampled_from(MACHINES))
def test_any_text(lines: list[str], machine: Machine) -> None:
    survives(lines, machine)


@given(st.data())
def test_cut_and_spliced(data: st.DataObject) -> None:
    lines = data.draw(st.lists(st.sampled_from(LINES), max_size=40))
    pieces = []
    for line in lines:
        begin = data.draw(st.integers(0, len(line)))
        end = data.draw(st.integers(begin, len(line)))
        pieces.append(data.draw(st.sampled_from([line, line[:end], line[begin:],
                                                 line[:begin] + data.draw(st.text(max_size=5)) + line[begin:],
                                                 line + line[begin:]])))
    survives(pieces, data.draw(st.sampled_from(MACHINES)))


def test_long_lines_cost_little() -> None:
    hostile = ["NCCL" + "a" * 200_000, "NCCL " + "1:" * 100_000, "NCCL " + "a:1:1 [0] " * 20_000,
               "n:1:2 [0] NCCL INFO " + "x/" * 100_000,
               "n:1:2 [0] NCCL INFO Channel 0 : " + "0[0] -> " * 50_000, "-" * 100_000 + "NCCL" + "." * 100_000]
    begin = time.process_time()
    survives(hostile * 5, MACHINES[1])
    assert time.process_time() - begin < 5


def test_many_lines_cost_little() -> None:
    begin = time.process_time()
    assert parse(LINES * 30).lines > 30 * 2000
    assert time.process_time() - begin < 30


def test_a_thousand_ranks_with_the_same_trouble_are_one_finding() -> None:
    line = "n7:{pid}:1 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.1<{pid}> with status=12 opcode=0 hca mlx5_3"
    found = [each for each in judge(parse(line.format(pid=pid) for pid in range(1000)), MACHINES[1])
             if each.code == "nccl-completion"]
    assert len(found) == 1
    assert "1000 such lines" in found[0].message
