"""The table and the JSON of ``hpc-mp bench``, read by a parser that knows nccl-tests alone."""

import json
import statistics as standard
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nccl_tests_output import HEADER, parse

from hpc_mp.doctor.bench.plan import split
from hpc_mp.doctor.bench.result import BenchRow, Yardstick, average, guess, judge, row, statistics, yardstick
from hpc_mp.doctor.bench.spec import BenchSpec
from hpc_mp.doctor.bench.table import document, foot, head, line, number
from hpc_mp.planner.collectives import COLLECTIVES, PLACED

GPU = "NVIDIA H100 80GB HBM3"


def said(world: int, seconds: float, wrong: int = 0, slow: int = -1) -> list[dict[str, Any]]:
    """What ranks say of one size: rank ``slow`` takes ten times as long in iteration 2."""
    times = [[seconds * (10 if rank == slow and turn == 2 else 1) for turn in range(5)] for rank in range(world)]
    return [{placed: [standard.fmean(own), wrong if rank == 0 else 0, own] for placed in PLACED}
            for rank, own in enumerate(times)]


def names(spec: BenchSpec, gpu: str = GPU) -> list[dict[str, Any]]:
    return [{"rank": rank, "group": spec.group_of(rank), "pid": 4000 + rank, "host": f"node{rank // spec.ranks_per_node}",
             "device": rank % spec.ranks_per_node, "name": gpu} for rank in range(spec.world)]


def spec_of(collective: str = "all_reduce", how: str = "all", sizes: tuple[int, ...] = (2**20,),
            backend: str = "nccl") -> BenchSpec:
    return BenchSpec(collective, backend, 2, 8, split(16, 8, how), sizes, iterations=5)  # type: ignore[arg-type]


def text(spec: BenchSpec, rows: list[BenchRow], against: Yardstick = Yardstick()) -> str:  # noqa: B008
    judged = judge(spec, rows, against)
    return "\n".join([*head(spec, names(spec), {"torch": "2.13.0"}), *(line(spec, each) for each in rows),
                      *foot(spec, rows, judged)]) + "\n"


@pytest.mark.parametrize("name", COLLECTIVES)
def test_an_nccl_tests_parser_reads_the_table(name: str) -> None:
    this, sizes = COLLECTIVES[name], (2**20, 2**24, 2**33)
    spec = spec_of(name, sizes=sizes)
    printed = text(spec, [row(spec, size, said(16, size / 100e9, wrong=3)) for size in sizes])
    assert HEADER in printed
    output = parse(printed)
    assert [each.size for each in output.lines] == list(sizes) and len(output.devices) == 16
    for each, size in zip(output.lines, sizes, strict=True):
        assert (each.dtype, each.redop) == ("float", "sum" if this.reduces else "none")
        assert each.root == (0 if this.rooted else -1) and each.count == this.counts(size, 16, 4).param
        assert each.out_of_place.algbw == pytest.approx(100, abs=0.01)
        assert each.out_of_place.busbw == pytest.approx(100 * this.factor(16), abs=0.01)
        assert each.out_of_place.time_us == pytest.approx(size / 100e3, rel=1e-3) and each.out_of_place.wrong == 3
        assert each.in_place.wrong == (3 if "in_place" in this.checked else None), "as theirs, it does not check some in place"
    assert (output.out_of_bounds, output.verdict) == (3, "FAILED")
    assert output.average == pytest.approx(100 * this.factor(16), rel=1e-5)


def test_a_row_is_theirs_character_by_character() -> None:
    """What nccl-tests printed for 2 p5 nodes at 16 GiB (66132 and 66109 µs), in the widths of its newest version."""
    spec = BenchSpec("all_reduce", "nccl", 2, 8, split(16, 8, "all"), (2**34,), iterations=1)
    times = {"out_of_place": 66132e-6, "in_place": 66109e-6}
    ranks = [{placed: [time, 0, [time]] for placed, time in times.items()} for _ in range(16)]
    assert line(spec, row(spec, 2**34, ranks)) == (
        " 17179869184    4294967296     float     sum      -1  66132.0  259.78  487.09       0  66109.0  259.87  487.26       0")


@given(st.floats(0, 1e12, allow_subnormal=False), st.sampled_from([6, 7]))
def test_numbers_keep_their_width_and_value(value: float, width: int) -> None:
    shown = number(value, width)
    assert len(shown) == width or value >= 10**width
    assert float(shown) == pytest.approx(value, rel=0.5 if value > 10**width else 0.01, abs=0.005)


def test_the_slowest_group_is_shown_and_the_median_beside_it() -> None:
    spec = spec_of(how="rail")
    ranks = said(16, 1e-3)
    for rank in (3, 11):  # rail 3
        ranks[rank] = {placed: [2e-3, 0, [2e-3] * 5] for placed in PLACED}
    rows = [row(spec, 2**20, ranks)]
    printed = text(spec, rows)
    usual = COLLECTIVES["all_reduce"].bandwidths(2**20, 1e-3, 2)[1]
    assert parse(printed).lines[0].in_place.busbw == pytest.approx(usual / 2, abs=0.005)
    assert "8 groups at the same time" in printed and "group 3: ranks 3, 11" in printed
    assert rows[0].median == pytest.approx(usual) and rows[0].worst.group == 3


def test_spikes_name_their_ranks_and_quiet_runs_have_none() -> None:
    spec = spec_of(how="node")
    noisy, quiet = (row(spec, 2**20, said(16, 1e-3, slow=slow)) for slow in (9, -1))
    (spike,) = noisy.groups[1].timings["in_place"].spikes
    assert (spike.iteration, spike.members) == (2, (1,)) and spike.times == pytest.approx(10)
    assert noisy.groups[0].timings["in_place"].spikes == () == quiet.groups[1].timings["in_place"].spikes
    assert "iteration 2: 10.0 x the median, seen by rank 9" in text(spec, [noisy])


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=200))
def test_statistics_are_those_of_numpy(times: list[float]) -> None:
    found = statistics(times)
    micro = np.array(times) * 1e6
    assert (found["min_us"], found["max_us"]) == pytest.approx((micro.min(), micro.max()))
    assert found["avg_us"] == pytest.approx(micro.mean()) and found["stdev_us"] == pytest.approx(micro.std(), abs=1e-6)
    for percent in (95, 99):
        assert found[f"p{percent}_us"] == pytest.approx(np.percentile(micro, percent, method="inverted_cdf"))


def test_the_document_has_the_keys_of_nccl_tests_and_all_digits() -> None:
    """Those that ``tools/analyze_perf_json.py`` reads, with the relations that it checks."""
    spec = spec_of()
    rows = [row(spec, 2**20, said(16, 1 / 3 * 1e-3, slow=2))]
    secret = {"AWS_SECRET_ACCESS_KEY": "x", "NCCL_ALGO": "Ring"}
    tree = json.loads(json.dumps(document(spec, names(spec), {}, rows, (), secret, ["hpc-mp"], ("then", "now"))))
    assert tree["version"] == 3 and tree["env"] == ["NCCL_ALGO=Ring"], "no secrets"
    assert tree["config"]["iterations"] == 5 and len(tree["config"]["devices"]) == 16
    (result,) = tree["results"]
    for placed in PLACED:
        per = result[f"{placed}_per_iter"]
        processes = per["per_process_max_times_us"]
        assert per["times_us"] == [max(own[turn] for own in processes) for turn in range(5)]
        assert per["max_us"] == max(per["times_us"]) and per["spikes"][0]["ranks"] == [2]
        assert result[placed]["bus_bw"] == rows[0].worst.timings[placed].busbw, "floats in full"
    assert tree["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert tree["average_bus_bandwidth"]["bandwidth"] == average(rows)


@pytest.mark.parametrize(("seconds", "verdict"), [(4.6e-3, "as expected"), (9e-3, "slow"), (2e-3, "faster than expected")])
def test_verdicts(seconds: float, verdict: str) -> None:
    spec = spec_of(sizes=(2**30,))
    rows = [row(spec, 2**30, said(16, seconds))]
    (judged,) = judge(spec, rows, yardstick("p5", None))
    assert judged.verdict == verdict and judged.share == pytest.approx(judged.measured / 15)
    assert verdict in text(spec, rows, yardstick("p5", None)) and parse(text(spec, rows, yardstick("p5", None))).lines


def test_small_payloads_are_judged_by_their_latency() -> None:
    """A constant would call 8 KiB slow; the model does not, but for far too long a time."""
    spec = spec_of(sizes=(8192,))
    for seconds, verdict in ((80e-6, "as expected"), (2e-3, "slow to start")):
        (judged,) = judge(spec, [row(spec, 8192, said(16, seconds))], yardstick("p5", None))
        assert judged.measured < 1 and judged.verdict == verdict


def test_what_is_unknown_is_not_judged_but_said() -> None:
    spec = spec_of()
    rows = [row(spec, 2**20, said(16, 1e-3))]
    assert judge(spec, rows, Yardstick()) == () and "unknown; name the fabric" in text(spec, rows)
    inside = spec_of(how="node")
    assert guess(Yardstick(), spec, [GPU]).fabric is None, "the GPU's name does not tell the NICs"
    assert guess(Yardstick(), inside, ["NVIDIA GB10"]).fabric is None
    known = guess(Yardstick(), inside, [GPU]).fabric
    assert known is not None and known.link == 20.6


def test_a_rate_of_the_node_judges_gloo() -> None:
    spec = spec_of("sendrecv", sizes=(2**24,), backend="gloo")
    rows = [row(spec, 2**24, said(16, 2**24 / (0.955 * 0.025e9)))]
    (judged,) = judge(spec, rows, yardstick(None, 0.025))
    assert judged.verdict == "as expected" and judged.share is None
    (judged,) = judge(spec, rows, yardstick(None, 0.1))
    assert judged.verdict == "slow"
