"""Nothing that stands in a log makes reading it fail, or slow."""

from __future__ import annotations

import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_mp.doctor.nccl_log import Machine, judge, parse

LOGS = Path(__file__).parents[1] / "nccl_logs"
LINES = [line for path in sorted(LOGS.glob("*.log")) for line in path.read_text(encoding="utf-8").splitlines()]
WORDS = ["NCCL", "INFO", "WARN", "Channel 00/0 : ", "->", "via", "NET/IB/", "[0]", "host:1:2 [0] NCCL INFO ",
         "Got completion from peer ",
         "status=", "comm 0x0 rank ", "nranks", "nRanks 99999999999999999999 ", "nNodes ", "Init START", "Init COMPLETE",
         "/dev/shm",
         "99999999999999999999999", "\x00", "\x1b[31m", "\ufffd", ":", "/", "(", "COLLNET/", "P2P/", "SHM/", "NET//", "-> Algo "]
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
    told = parse(LINES * 30)
    assert told.lines > 30 * 2000
    assert time.process_time() - begin < 30


def test_a_thousand_ranks_with_the_same_trouble_are_one_finding() -> None:
    line = "n7:{pid}:1 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.1<{pid}> with status=12 opcode=0 hca mlx5_3"
    found = [each for each in judge(parse(line.format(pid=pid) for pid in range(1000)), MACHINES[1])
             if each.code == "nccl-completion"]
    assert len(found) == 1
    assert "1000 such lines" in found[0].message
