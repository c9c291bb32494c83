"""Leaves inferred from measured rates, and Slurm's belief held against them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured import Groups, leaves, measure

from hpc_mp.cluster.bandwidth import LinkRates
from hpc_mp.cluster.topology import Switch, SwitchTree, Topology
from hpc_mp.cluster.topology.check import agreement
from hpc_mp.cluster.topology.inferred import infer, read_measured_topology

Change = Callable[[str, str, float], float]


def believe(groups: Groups, root: bool = True) -> SwitchTree:
    switches = [Switch(f"s{i}", tuple(nodes)) for i, nodes in enumerate(groups, 1)]
    above = [Switch("root", (), tuple(switch.name for switch in switches))] if root else []
    return Topology(kind="tree", switches=(*switches, *above)).tree


def noise(spread: float, seed: int) -> Change:
    random = Random(seed)
    return lambda _a, _b, rate: rate * random.lognormvariate(0, spread)


def kinds(of: Mapping[str, int], seed: int) -> Change:
    """Pairs across, alone on an uplink or with others: what was measured on real links; with noise."""
    random = Random(seed)
    return lambda a, b, rate: rate * random.lognormvariate(0, 0.1) * (1 if of[a] == of[b] else random.choice((0.25, 0.3, 0.5)))


# --- what rates show -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(2, 8), min_size=2, max_size=5), st.floats(0.1, 0.55), st.integers(0, 1000))
def test_leaves_behind_narrow_uplinks_are_found(sizes: list[int], across: float, seed: int) -> None:
    groups = leaves(*sizes)
    seen = infer(measure(groups, across, seed=seed))
    assert sorted(map(sorted, seen.groups)) == sorted(map(sorted, groups)) and seen.unplaced == ()


@given(st.lists(st.integers(2, 8), min_size=2, max_size=5), st.floats(0.9, 1.0), st.integers(0, 1000))
def test_nothing_is_claimed_where_uplinks_carry_everything(sizes: list[int], across: float, seed: int) -> None:
    seen = infer(measure(leaves(*sizes), across, seed=seed))
    assert seen.groups == () and "do not distinguish leaves" in seen.why


@given(st.integers(0, 1000), st.integers(0, 31), st.floats(0.02, 0.6))
def test_a_slow_node_or_link_is_no_leaf(seed: int, bad: int, share: float) -> None:
    def slow(a: str, b: str, rate: float) -> float:
        return rate * share if f"n{bad + 1}" in (a, b) else rate

    def pair(a: str, b: str, rate: float) -> float:
        return rate * share if (a, b) == ("n3", "n9") else rate

    for change in (slow, pair):
        assert infer(measure(leaves(32), seed=seed, change=change)).groups == ()
    groups = leaves(8, 8, 8, 8)
    seen = infer(measure(groups, 0.4, seed=seed, change=pair))
    assert sorted(map(sorted, seen.groups)) == sorted(map(sorted, groups))
    seen = infer(measure(groups, 0.4, seed=seed, change=slow))
    planted = [{node for node in nodes if node != f"n{bad + 1}"} for nodes in groups]
    for found in seen.groups:
        assert any(set(found) - {f"n{bad + 1}"} == nodes for nodes in planted)
    assert len(seen.groups) == 4


@pytest.mark.parametrize("nodes", [64, 256, 1024])
def test_a_part_of_the_pairs_is_enough_or_said_not_to_be(nodes: int) -> None:
    """As many rounds as a survey has: 2 log2 n + 6."""
    groups = leaves(*[16] * (nodes // 16))
    seen = infer(measure(groups, 0.4, rounds=2 * (nodes.bit_length() - 1) + 6, seed=nodes))
    planted = {node: number for number, members in enumerate(groups) for node in members}
    for found in seen.groups:
        assert len({planted[node] for node in found}) == 1, "a group never spans two leaves"
    if nodes == 64:
        assert len(seen.groups) == 4 and sum(map(len, seen.groups)) >= 60


@pytest.mark.parametrize(("nodes", "rounds", "spread"), [
    (4, None, 0.15), (6, None, 0.15), (16, None, 0.15), (16, None, 0.3), (64, 18, 0.15), (64, 18, 0.3)])
def test_noise_is_no_leaf(nodes: int, rounds: int | None, spread: float) -> None:
    for seed in range(100 if rounds is None else 20):
        assert infer(measure(leaves(nodes), 1.0, rounds, seed, noise(spread, seed))).groups == (), seed


@pytest.mark.parametrize("sizes", [(4, 4), (8, 8), (4, 4, 4, 4), (16, 16, 16, 16)])
def test_pairs_across_are_of_several_kinds(sizes: Sequence[int]) -> None:
    groups = leaves(*sizes)
    of = {node: number for number, nodes in enumerate(groups) for node in nodes}
    exact = 0
    for seed in range(20):
        seen = infer(measure(groups, 1.0, 18 if len(of) > 16 else None, seed, kinds(of, seed)))
        exact += sorted(map(sorted, seen.groups)) == sorted(map(sorted, groups))
        assert all(len({of[node] for node in found}) == 1 for found in seen.groups)
    assert exact >= (18 if len(of) <= 16 else 8)


def test_groups_that_no_pair_parts_may_be_one() -> None:
    whole = measure(leaves(2, 2, 4), 0.3)
    part = LinkRates("x", 0.0, whole.nodes, tuple(pair for pair in whole.pairs if not (pair[0] < 2 <= pair[1] < 4)))
    assert infer(whole).groups == (("n1", "n2"), ("n3", "n4"), ("n5", "n6", "n7", "n8"))
    assert infer(part).groups == (("n1", "n2"), ("n5", "n6", "n7", "n8")) and infer(part).unplaced == ("n3", "n4")


def test_rates_that_fall_with_the_distance_are_no_groups() -> None:
    def near(a: str, b: str, rate: float) -> float:
        return rate if abs(int(a[1:]) - int(b[1:])) <= 2 else rate * 0.4

    assert infer(measure(leaves(16), 1.0, change=near)).groups == ()


def test_too_little_shows_nothing() -> None:
    assert infer(LinkRates("x", 0.0, ("a", "b"), ((0, 1, 5.0),))).groups == ()
    assert infer(LinkRates("x", 0.0, ("a", "b"), ())).groups == ()
    assert infer(measure(leaves(2, 1), 0.3)).groups == (), "one group and a single node: it may just be slow"


def test_a_tree_of_what_was_measured() -> None:
    known = read_measured_topology(measure(leaves(2, 2), 0.3), "rates")
    assert known.topologies == (Topology(kind="tree", default=True, switches=(
        Switch("leaf1", ("n1", "n2")), Switch("leaf2", ("n3", "n4")), Switch("root", (), ("leaf1", "leaf2")))),)
    assert "GB/s inside 2 groups" in known.notes[0]
    assert read_measured_topology(measure(leaves(4)), "rates").topologies == ()


# --- belief and measurement ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(2, 8), min_size=2, max_size=5), st.integers(0, 1000))
def test_a_belief_that_is_right_raises_nothing(sizes: list[int], seed: int) -> None:
    groups = leaves(*sizes)
    found = agreement(believe(groups), measure(groups, 0.4, seed=seed))
    assert (found.verdict, found.odd) == ("agrees", ())


@given(st.lists(st.integers(4, 8), min_size=2, max_size=4), st.integers(0, 1000), st.data())
def test_nodes_that_slurm_has_elsewhere_are_named(sizes: list[int], seed: int, data: st.DataObject) -> None:
    groups = leaves(*sizes)
    source, target = data.draw(st.permutations(range(len(groups))))[:2]
    moved = data.draw(st.sampled_from(groups[source]))
    wrong = [[node for node in nodes if node != moved] + ([moved] if number == target else [])
             for number, nodes in enumerate(groups)]
    found = agreement(believe(wrong), measure(groups, 0.4, seed=seed))
    assert found.verdict == "disagrees"
    (odd,) = found.odd
    assert (odd.nodes, odd.believed, odd.home) == ((moved,), f"s{target + 1}", f"s{source + 1}")
    assert odd.measured in groups[source]


@pytest.mark.parametrize(("belief", "measured", "odd"), [
    ([["n1", "n2", "n7"], ["n5", "n6", "n3"]], [["n1", "n2", "n3"], ["n5", "n6", "n7"]],
     {("n3", "s2", "s1"), ("n7", "s1", "s2")}),  # swapped
    ([["n1", "n2", "n3", "n4", "n5"]], leaves(3, 2), {("n4 n5", "s1", "")}),  # one leaf in Slurm that is two
    ([["n1", "n2"], ["n3", "n4"], ["n5", "n6", "n7"]], leaves(4, 3), {("n3 n4", "s2", "s1")}),  # two that are one
    ([["n1", "n2"], ["n4", "n5", "n6"]], leaves(3, 3), {("n3", "", "s1")}),  # a node that Slurm knows no switch of
    ([], leaves(3, 3), {("n1 n2 n3 n4 n5 n6", "", "")}),  # nor of any
])
def test_what_is_otherwise_is_named(belief: Groups, measured: Groups, odd: set[tuple[str, str, str]]) -> None:
    found = agreement(believe(belief, root=len(belief) == 2), measure(measured, 0.4))
    assert found.verdict == "disagrees" and ("knows no switch" in found.why) == (not belief)
    assert {(" ".join(each.nodes), each.believed, each.home) for each in found.odd} == odd


def test_groups_may_be_a_higher_storey() -> None:
    """Leaves of one pod do not slow each other; pods do: Slurm is right, though its leaves are not to be seen."""
    switches = [Switch(f"l{i}", (f"n{2 * i - 1}", f"n{2 * i}")) for i in (1, 2, 3, 4)]
    switches += [Switch("p1", (), ("l1", "l2")), Switch("p2", (), ("l3", "l4")), Switch("root", (), ("p1", "p2"))]
    tree = Topology(kind="tree", switches=tuple(switches)).tree
    assert agreement(tree, measure(leaves(4, 4), 0.4)).verdict == "agrees"
    assert agreement(tree, measure([["n1", "n2", "n5", "n6"], ["n3", "n4", "n7", "n8"]], 0.4)).verdict == "disagrees"


@pytest.mark.parametrize(("nodes", "size"), [(64, 16), (256, 32), (256, 64)])
def test_large_clusters_are_told_by_a_part_of_the_pairs(nodes: int, size: int) -> None:
    """A survey's rounds, links with noise: what is right is never blamed, and of what is wrong only it."""
    groups = leaves(*[size] * (nodes // size))
    of = {node: number for number, members in enumerate(groups) for node in members}
    verdicts, named = Counter[str](), 0
    for seed in range(10):
        rates = measure(groups, 1.0, 2 * (nodes.bit_length() - 1) + 6, seed, kinds(of, seed))
        found = agreement(believe(groups), rates)
        assert (found.verdict, found.odd) == ("agrees", ()), seed
        moved = f"n{Random(seed).randrange(nodes) + 1}"
        wrong = [[node for node in members if node != moved] for members in groups]
        wrong[(of[moved] + 1) % len(groups)].append(moved)
        found = agreement(believe(wrong), rates)
        assert {node for odd in found.odd for node in odd.nodes} <= {moved}, seed
        verdicts[found.verdict] += 1
        named += bool(found.odd) or moved in found.unplaced
    assert named == 10 and verdicts["disagrees"] >= 6, verdicts


@pytest.mark.parametrize("nodes", [64, 256])
def test_large_clusters_of_equal_rates_say_nothing(nodes: int) -> None:
    rates = measure(leaves(nodes), 1.0, 2 * (nodes.bit_length() - 1) + 6)
    assert agreement(believe(leaves(*[16] * (nodes // 16))), rates).verdict == "cannot tell"


def test_nothing_to_be_seen_is_said() -> None:
    found = agreement(believe(leaves(2, 2)), measure(leaves(4)))
    assert found.verdict == "cannot tell" and "do not distinguish leaves" in found.why and found.odd == ()


def test_a_stray_pair_moves_no_node() -> None:
    """n12 was measured with one node of the other leaf only, and by chance that was fast."""
    groups = leaves(6, 6)
    whole = measure(groups, 0.4)
    met = tuple((a, b, 99.0 if (a, b) == (0, 11) else rate) for a, b, rate in whole.pairs if b < 11 or a >= 6 or a == 0)
    rates = LinkRates("x", 0.0, whole.nodes, met)
    assert [{*nodes} <= {*leaf} for nodes, leaf in zip(infer(rates).groups, groups, strict=True)] == [True, True]
    assert agreement(believe(groups), rates).verdict == "agrees"


@pytest.mark.parametrize(("nodes", "size"), [(64, 16), (256, 32)])
def test_leaves_that_are_two_or_one_are_found_where_groups_are_not(nodes: int, size: int) -> None:
    groups = leaves(*[size] * (nodes // size))
    first, second, *others = groups
    wrong = {
        "two": [[*first, *second], *others],
        "one": [first[: size // 2], first[size // 2 :], second, *others],
        "none": [first[1:], second, *others],
    }
    counts = Counter[str]()
    for seed in range(8):
        rates = measure(groups, 0.6, 2 * (nodes.bit_length() - 1) + 6, seed, noise(0.1, seed))
        right = agreement(believe(groups), rates)
        assert right.verdict in ("agrees", "cannot tell") and not right.odd, seed
        for name, belief in wrong.items():
            found = agreement(believe(belief), rates)
            assert {node for odd in found.odd for node in odd.nodes} <= {*first, *second}, (name, seed)
            counts[name] += found.verdict == "disagrees"
    assert min(counts[name] for name in wrong) >= 6, counts

