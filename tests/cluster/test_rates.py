"""Rates between hosts: without their scatter, of pairs that nobody measured, and the order of hosts that they make."""

import json
import time
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placements import FABRIC

from hpc_mp.cluster.bandwidth import LinkRates, TieredRates, rates, read_measured, write_measured
from hpc_mp.cluster.topology import SwitchTree, read_topology
from hpc_mp.layout.placement import Degrees, Placement, place
from hpc_mp.planner.assignment import cheapest_hosts, step_times
from hpc_mp.rundir.plan import Traffic

HEAVY_DATA, HEAVY_PIPELINE = Traffic(tp=50e9, pp=2e9, dp=9e9), Traffic(tp=50e9, pp=9e9, dp=2e9)
Pairs = dict[tuple[int, int], float]


def names(number: int) -> tuple[str, ...]:
    return tuple(f"n{i}" for i in range(1, number + 1))


def tiers(number: int, *pairs: tuple[int, int, float]) -> TieredRates:
    found = rates(LinkRates("lab", 0.0, names(number), pairs))
    assert found is not None
    return found


def known(number: int, planted: Pairs, usual: float = 25.0, scatter: Random | None = None) -> TieredRates:
    """All pairs of so many hosts at the usual rate, but for planted ones; scattered by up to 5 % either way."""
    return tiers(number, *((i, j, planted.get((i, j), usual) * (scatter.uniform(0.95, 1.05) if scatter else 1))
                           for i, j in combinations(range(number), 2)))


# --- rates -----------------------------------------------------------------------------------------------------------


def test_tiers_take_the_scatter_away() -> None:
    found = tiers(5, (0, 1, 24.0), (0, 2, 25.0), (1, 2, 26.0), (0, 3, 10.0), (1, 3, 10.4), (3, 4, 5.0))
    assert found.usual == 24.0  # 5 10 10.4 | 24 25 26: the higher of the two in the middle
    assert found.between("n1", "n2") == found.between("n3", "n1") == found.between("n2", "n3") == 24.0
    assert found.between("n1", "n4") == found.between("n4", "n2") == 10.0
    assert found.between("n4", "n5") == 5.0
    assert rates(LinkRates("lab", 0.0, names(2), ())) is None


def test_a_pair_that_nobody_measured_is_usual_or_as_bad_as_its_worse_end() -> None:
    usual: Pairs = {pair: 25.0 for pair in combinations(range(4), 2)}
    found = tiers(6, *((i, j, rate) for (i, j), rate in (usual | {(0, 4): 9.0, (1, 4): 9.0, (0, 5): 3.0}).items()))
    assert found.between("n3", "n5") == found.between("n5", "elsewhere") == 9.0  # n5 was slow with two others
    assert found.between("n3", "n6") == found.between("elsewhere", "n1") == 25.0  # n1–n6 alone: it may be that way's fault
    assert found.uneven(("n1", "n2", "n3", "elsewhere")) == frozenset()
    assert found.uneven(("n1", "n2", "n6")) == {"n1", "n6"}
    assert found.slow(names(6)) == {("n1", "n6"): 3 / 25, ("n5",): 9 / 25}


@given(st.integers(3, 12), st.floats(0.01, 400), st.randoms(use_true_random=False), st.randoms(use_true_random=False))
def test_scatter_changes_nothing(number: int, usual: float, scatter: Random, shuffled: Random) -> None:
    """Rates within 10 % of each other are all alike; a single one at 70 % is seen."""
    hosts = names(number)
    assert known(number, {}, usual, scatter).uneven(hosts) == frozenset()
    if number > 3:
        assert known(number, {(0, 1): 0.7 * usual}, usual, scatter).uneven(hosts) == {"n1", "n2"}


@pytest.mark.parametrize("wrong", [{"pairs": [[0, 1, 0.0]]}, {"pairs": [[0, 1, float("nan")]]}, {"pairs": [[0, 2, 1.0]]},
                                   {"pairs": [[0, 1, -2.0]]}, {"pairs": [[1]]}, {"time": "yesterday"}, {"nodes": 3},
                                   "{", "[]", '{"pairs": [], "nodes": []}'])
def test_a_file_that_makes_no_sense_is_passed_over(tmp_path: Path, wrong: dict[str, object] | str) -> None:
    path, rates = tmp_path / "cluster.json", LinkRates("x", 1.0, ("a", "b"), ((0, 1, 2.5),), "azure-ndv4")
    assert read_measured(path) is None
    write_measured(path, rates)
    assert read_measured(path) == rates
    path.write_text(wrong if isinstance(wrong, str) else json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.warns(UserWarning, match="measured bandwidths are unknown"):
        assert read_measured(path) is None


@pytest.mark.parametrize(("seconds", "words"), [(-50, "just now"), (600, "10 min ago"), (7200, "2 h ago"),
                                                (47 * 3600, "2 d ago"), (3 * 86400, "3 d ago")])
def test_the_age_of_a_measurement(seconds: float, words: str) -> None:
    made = LinkRates("x", time.time() - seconds, (), ())
    assert made.when() == words and made.recent() and not replace(made, time=made.time - 31 * 86400).recent()


# --- the cost --------------------------------------------------------------------------------------------------------


def test_times_by_hand() -> None:
    """T2 P2 D2, nodes are (d, p): two edges of each kind go each way between neighbours, nothing from corner to corner."""
    placement, moved = place(Degrees(2, 2, 2), "DPT", 2), Traffic(tp=50e9, pp=1e9, dp=4e9)
    cost = step_times(placement, moved, known(4, {(0, 1): 0.5, (0, 2): 2.0, (0, 3): 4.0, (1, 2): 4.0, (1, 3): 4.0, (2, 3): 4.0}))
    # n1–n2 pp 2/0.5 = 4 s, n1–n3 dp 8/2 = 4 s, n2–n4 8/4 = 2 s, n3–n4 2/4 = 0.5 s; n1, n2 … send 10/4 = 2.5 s each.
    assert cost(("n1", "n2", "n3", "n4")) == pytest.approx((4.0, 2 * (4 + 4 + 2 + 0.5)))
    # n1–n2 in the corners: n1–n4 pp, n1–n3 dp, n4–n2 dp, n3–n2 pp.
    assert cost(("n1", "n4", "n3", "n2")) == pytest.approx((4.0, 2 * (0.5 + 4 + 2 + 0.5)))


def test_a_slow_node_counts_with_all_it_sends() -> None:
    """A chain of four stages: the first and the last send once, the others twice."""
    placement, slow = place(Degrees(pipeline=4), "DPT", 1), {(0, 1): 5.0, (1, 2): 5.0, (1, 3): 5.0}
    found = known(4, slow)
    assert step_times(placement, Traffic(pp=1e9), found)(names(4))[0] == pytest.approx(2 / 5)
    ordered = cheapest_hosts(placement, Traffic(pp=1e9), names(4), SwitchTree(), found)
    assert ordered.index("n2") in (0, 3)
    assert step_times(placement, Traffic(pp=1e9), found)(ordered)[0] == pytest.approx(1 / 5)


def test_orders_that_are_alike_cost_the_same_to_the_last_bit() -> None:
    """With one slow way, it matters alone whether it has the pipeline's, the data's or no bytes to carry."""
    placement, found = place(Degrees(2, 2, 2), "DPT", 2), known(4, {(0, 1): 0.7}, usual=3.0)
    cost = step_times(placement, Traffic(tp=1e9, pp=1.1e9, dp=3.3e9), found)
    assert len({cost(order) for order in permutations(names(4))}) == 3


# --- the order -------------------------------------------------------------------------------------------------------

LAYOUTS = {4: [(Degrees(2, 2, 2), 2), (Degrees(2, 1, 4), 2), (Degrees(1, 4, 1), 1), (Degrees(1, 4, 2), 2), (Degrees(4, 4, 1), 4)],
           8: [(Degrees(8, 2, 4), 8), (Degrees(8, 4, 2), 8), (Degrees(8, 8, 1), 8), (Degrees(8, 1, 8), 8), (Degrees(2, 2, 8), 4)]}
CASES = [(number, degrees, per_node, order) for number, some in LAYOUTS.items() for degrees, per_node in some
         for order in ("DPT", "PDT")]


def passing(placement: Placement, moved: Traffic, hosts: tuple[str, ...], a: str, b: str) -> float:
    """Bytes between two hosts, counted rank by rank."""
    total = 0.0
    for axis, closed in (("tp", True), ("dp", True), ("pp", False)):
        for group in placement.groups[axis]:
            edges = [*pairwise(group), *([(group[-1], group[0])] if closed else [])]
            for one, other in edges:
                if {hosts[placement.ranks[one].node], hosts[placement.ranks[other].node]} == {a, b}:
                    total += getattr(moved, axis) * (1 if closed else 2)
    return total


@settings(max_examples=settings.default.max_examples // 4)
@given(st.sampled_from(CASES), st.sampled_from([HEAVY_DATA, HEAVY_PIPELINE]), st.floats(0.1, 0.7), st.data())
def test_one_slow_link_gets_the_least_that_any_order_gives_it(case: tuple[int, Degrees, int, str], moved: Traffic, share: float,
                                                              data: st.DataObject) -> None:
    number, degrees, per_node, order = case
    placement, hosts = place(degrees, order, per_node), names(number)
    slow = data.draw(st.sampled_from(list(combinations(range(number), 2))))
    a, b = hosts[slow[0]], hosts[slow[1]]
    found = known(number, {slow: 25.0 * share}, scatter=Random(data.draw(st.integers(0, 99))))
    ordered = cheapest_hosts(placement, moved, hosts, SwitchTree(), found)
    # All orders: the two hosts may stand at any two nodes, so what passes between them is what passes between some two nodes.
    least = min(passing(placement, moved, hosts, *two) for two in combinations(hosts, 2))
    assert sorted(ordered) == sorted(hosts)
    assert passing(placement, moved, ordered, a, b) == least
    if passing(placement, moved, hosts, a, b) == least:
        assert ordered == hosts, "nothing was to be gained"


@settings(max_examples=settings.default.max_examples // 2)
@given(st.sampled_from([case for case in CASES if case[0] == 4]), st.sampled_from([HEAVY_DATA, HEAVY_PIPELINE]),
       st.lists(st.sampled_from([5.0, 12.0, 25.0, 60.0]), min_size=6, max_size=6), st.booleans())
def test_no_order_of_four_is_cheaper(case: tuple[int, Degrees, int, str], moved: Traffic, each: list[float], tree: bool) -> None:
    """Whatever the rates are; and of the equally cheap ones none leaves less to the busiest leaf."""
    number, degrees, per_node, order = case
    placement, hosts = place(degrees, order, per_node), names(number)
    found = known(number, dict(zip(combinations(range(4), 2), each, strict=True)))
    cost = step_times(placement, moved, found)
    switches = read_topology(FABRIC) if tree else SwitchTree()
    assert cost(cheapest_hosts(placement, moved, hosts, switches, found)) == min(map(cost, permutations(hosts)))


@settings(max_examples=settings.default.max_examples // 2)
@given(st.sampled_from([case for case in CASES if case[0] == 4]), st.permutations(names(4)), st.booleans(),
       st.randoms(use_true_random=False))
def test_equal_rates_leave_the_order_to_the_switches(case: tuple[int, Degrees, int, str], hosts: list[str], tree: bool,
                                                     scatter: Random) -> None:
    _, degrees, per_node, order = case
    placement, switches = place(degrees, order, per_node), read_topology(FABRIC) if tree else SwitchTree()
    assert cheapest_hosts(placement, HEAVY_DATA, hosts, switches, known(4, {}, scatter=scatter)) == (
        cheapest_hosts(placement, HEAVY_DATA, hosts, switches))
    cost = step_times(placement, HEAVY_DATA, known(4, {}))
    assert len({cost(some) for some in permutations(hosts)}) == 1  # to the last bit


def test_what_nothing_is_gained_by_stays_as_the_switches_have_it() -> None:
    """n1 and n2 under a leaf are replicas of a stage: their link matters, that of n1 and n4 has nothing to carry."""
    placement, switches = place(Degrees(2, 2, 2), "DPT", 2), read_topology("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]")
    paired = cheapest_hosts(placement, HEAVY_DATA, names(4), switches)
    assert paired == ("n1", "n3", "n2", "n4")
    assert cheapest_hosts(placement, HEAVY_DATA, names(4), switches, known(4, {(0, 3): 5.0})) == paired
    assert cheapest_hosts(placement, HEAVY_DATA, names(4), switches, known(4, {(0, 1): 5.0})) != paired


def test_where_the_link_is_slow_matters() -> None:
    """Negative control: the same job on the same hosts gets another order where another link is slow."""
    placement = place(Degrees(8, 2, 4), "DPT", 8)
    orders = {cheapest_hosts(placement, HEAVY_DATA, names(8), SwitchTree(), known(8, {slow: 8.0}))
              for slow in [(0, 2), (0, 1), (1, 3), (0, 4)]}
    assert len(orders) == 4 and names(8) in orders  # n1 and n5 have nothing to say to each other as it is


def test_hosts_that_nobody_measured_are_as_good_as_the_usual() -> None:
    placement = place(Degrees(2, 2, 2), "DPT", 2)
    found = tiers(3, (0, 1, 25.0), (0, 2, 5.0), (1, 2, 25.0))  # of n4 nothing is known
    ordered = cheapest_hosts(placement, HEAVY_DATA, names(4), SwitchTree(), found)
    assert passing(placement, HEAVY_DATA, names(4), "n1", "n3") > 0 == passing(placement, HEAVY_DATA, ordered, "n1", "n3")
    strangers = ("a", "b", "c", "d")
    assert cheapest_hosts(placement, HEAVY_DATA, strangers, SwitchTree(), found) == strangers


@pytest.mark.parametrize("number", [8, 16, 64])
@pytest.mark.parametrize("order", ["DPT", "PDT"])
def test_many_hosts_are_exchanged_two_by_two(number: int, order: str) -> None:
    placement, hosts = place(Degrees(8, 4, number // 4), order, 8), names(number)
    for planted in [(0, 1), (0, 4), (3, 7), (number - 4, number - 1)]:
        found = known(number, {planted: 8.0})
        cost = step_times(placement, HEAVY_DATA, found)
        ordered = cheapest_hosts(placement, HEAVY_DATA, hosts, SwitchTree(), found)
        least = min(passing(placement, HEAVY_DATA, hosts, *two) for two in combinations(hosts[:8], 2))
        assert passing(placement, HEAVY_DATA, ordered, hosts[planted[0]], hosts[planted[1]]) == least
        assert cost(ordered) <= cost(hosts)


def test_two_halves_with_a_slow_way_between_them_keep_the_heavy_axis_inside() -> None:
    """16 hosts, no switches known. Replicas talk most; stages may be apart: nothing but activations passes between halves."""
    placement, hosts = place(Degrees(8, 4, 4), "DPT", 8), names(16)
    found = known(16, {(i, j): 9.0 for i in range(8) for j in range(8, 16)})
    ordered = cheapest_hosts(placement, HEAVY_DATA, hosts, SwitchTree(), found)
    half = {host: number // 8 for number, host in enumerate(hosts)}
    assert all(len({half[ordered[placement.ranks[rank].node]] for rank in group}) == 1 for group in placement.groups["dp"])
    assert step_times(placement, HEAVY_DATA, found)(ordered) < step_times(placement, HEAVY_DATA, found)(hosts)
