"""Definitions of ``hpc-mp bench``: bandwidths, counts, sizes and groups, against those of nccl-tests."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.doctor.bench.plan import along, split
from hpc_mp.doctor.bench.spec import ELEMENT, BenchSpec, dump_spec, load_spec, nodes_of, parse_size, sweep
from hpc_mp.layout.placement import ORDERS, Degrees, place
from hpc_mp.planner.collectives import COLLECTIVES, collective

RANKS = st.integers(1, 512)
NAMES = st.sampled_from(list(COLLECTIVES))


# --- bandwidths ------------------------------------------------------------------------------------------------------


@given(RANKS, st.integers(1, 2**40), st.floats(1e-7, 1e3))
def test_busbw_is_that_of_performance_md(n: int, size: int, seconds: float) -> None:
    """``B = S/t * factor`` with the factors of its summary; S the whole array, GB = 10⁹ bytes."""
    factors = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": (n - 1) / n, "broadcast": 1,
               "all_to_all": (n - 1) / n, "sendrecv": 1}
    assert factors.keys() == COLLECTIVES.keys()
    for name, factor in factors.items():
        algbw, busbw = COLLECTIVES[name].bandwidths(size, seconds, n)
        assert algbw == pytest.approx(size / seconds / 1e9) and busbw == pytest.approx(algbw * factor)


# --- counts ----------------------------------------------------------------------------------------------------------


@given(NAMES, st.integers(0, 2**36), RANKS, st.sampled_from(sorted(set(ELEMENT.values()))))
def test_counts_are_those_of_nccl_tests(name: str, size: int, n: int, element: int) -> None:
    counts = COLLECTIVES[name].counts(size, n, element)
    count = size // element
    base = (count // n) & ~(16 // element - 1)  # src/all_gather.cu and its neighbours
    if name in ("all_gather", "reduce_scatter", "all_to_all"):
        send, receive = {"all_gather": (base, base * n), "reduce_scatter": (base * n, base), "all_to_all": (base * n,) * 2}[name]
        assert (counts.param, counts.send, counts.receive, counts.total) == (base, send, receive, base * n)
        assert base * element % 16 == 0
    else:
        assert (counts.param, counts.send, counts.receive, counts.total) == (count,) * 4


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("32K", 32768), ("1.5M", 1572864), ("8G", 2**33), ("128m", 2**27),
                                            ("4MiB", 2**22), ("1kb", 1024)])
def test_sizes_are_written_as_nccl_tests_takes_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@given(st.integers(1, 2**20), st.integers(0, 2**34), st.integers(2, 16))
def test_a_sweep_multiplies(begin: int, more: int, factor: int) -> None:
    sizes = sweep(begin, begin + more, factor)
    assert sizes[0] == begin and sizes[-1] <= begin + more < sizes[-1] * factor
    assert all(after == before * factor for before, after in pairwise(sizes))


def test_a_sweep_adds() -> None:
    assert sweep(10, 25, 2, step=5) == (10, 15, 20, 25)


# --- groups ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 16), st.integers(1, 8), st.sampled_from(["all", "node", "rail", "MOD 3", "DIV 4", "AND 0x6", "OR 0b11"]))
def test_groups_hold_each_rank_once(nodes: int, here: int, how: str) -> None:
    world = nodes * here
    groups = split(world, here, how)
    assert sorted(rank for group in groups for rank in group) == list(range(world))
    assert all(list(group) == sorted(group) for group in groups)
    if how == "rail":
        assert {len(group) for group in groups} == {nodes} and {rank % here for rank in groups[0]} == {0}
        assert all(nodes_of(group, here) == nodes for group in groups)
    if how == "node":
        assert all(nodes_of(group, here) == 1 and len(group) == here for group in groups)


def test_nccl_tests_own_examples() -> None:
    """README: with 8 GPUs per node, AND 0x7 is MOD 8 (rails), OR 0x7 is DIV 8 (nodes), AND 0x1 is every other rank."""
    assert split(32, 8, "AND 0x7") == split(32, 8, "MOD 8") == split(32, 8, "%8") == split(32, 8, "rail")
    assert split(32, 8, "OR 0x7") == split(32, 8, "DIV 8") == split(32, 8, "/8") == split(32, 8, "node")
    assert split(8, 8, "AND 0x1") == ((0, 2, 4, 6), (1, 3, 5, 7))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from(ORDERS), st.integers(1, 8),
       st.sampled_from(["tp", "pp", "dp", "mp", "tp_dp"]))
def test_groups_of_an_axis_are_those_of_a_job(t: int, p: int, d: int, order: str, here: int, axis: str) -> None:
    degrees = Degrees(t, p, d)
    assert along(axis, degrees, order, here) == place(degrees, order, here).groups[axis]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "words"), [
    *((partial(parse_size, text), "number of bytes") for text in ("", "M", "8X", "-8", "1e6", "8 8")),
    *((partial(sweep, *sizes), words) for *sizes, words in (
        (0, 8, 2, "must ascend"), (8, 4, 2, "must ascend"), (8, 16, 1, "-f 1"), (8, 16, 2, 0, "-i 0"))),
    *((partial(split, 8, 4, how), "--split") for how in ("nodes", "MOD", "MOD 0", "DIV 0", "XOR 3", "MOD -1")),
    (partial(collective, "allreduce"), "all_reduce, all_gather"),
    (partial(along, "cp", Degrees(2, 1, 2), "cluster", 2), "tp, pp, dp")])
def test_what_does_not_exist_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        call()


# --- the specification -----------------------------------------------------------------------------------------------


@given(NAMES, st.integers(1, 4), st.integers(2, 4), st.lists(st.integers(8, 2**30), min_size=1, max_size=5),
       st.sampled_from(list(ELEMENT)), st.booleans())
def test_a_specification_survives_its_journey(name: str, nodes: int, here: int, sizes: list[int], dtype: str,
                                              check: bool) -> None:
    spec = BenchSpec(name, "gloo", nodes, here, split(nodes * here, here, "node"), tuple(sizes), dtype, check=check)
    assert load_spec(dump_spec(spec)) == spec and "\n" not in dump_spec(spec)
    assert all(spec.groups[spec.group_of(rank)].count(rank) == 1 for rank in range(spec.world))


@pytest.mark.parametrize(("changes", "words"), table(__file__, "busbw.toml", "not_measured"))
def test_what_cannot_be_measured_is_refused(changes: dict[str, object], words: str) -> None:
    whole = {"collective": "all_reduce", "backend": "gloo", "nodes": 2, "ranks_per_node": 2, "groups": ((0, 1, 2, 3),),
             "sizes": (8,)}
    with pytest.raises(HpcMpError, match=words):
        BenchSpec(**whole | changes)  # type: ignore[arg-type]


def test_bandwidth_of_no_time_is_no_infinity() -> None:
    assert COLLECTIVES["broadcast"].bandwidths(8, 0.0, 2) == (0.0, 0.0)
    assert not any(math.isinf(each.factor(1)) for each in COLLECTIVES.values())
