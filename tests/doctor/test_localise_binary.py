"""Which node, link or uplink explains bad pairs."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_mp.doctor.localise import nodes_of, of_pairs

FOUR = ("n1", "n2", "n3", "n4")
LEAVES = {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2"}
THREE = {**LEAVES, "n5": "s3", "n6": "s3"}


Named = list[tuple[str, tuple[str, ...], bool]]


def named(nodes: tuple[str, ...], bad: set[tuple[str, str]], leaves: dict[str, str] | None = None) -> Named:
    found = [*of_pairs(bad, {*combinations(nodes, 2)} - bad, leaves or {})]
    touched = {member for suspect in found for member in (*suspect.members, *nodes_of(suspect.members))}
    assert all(touched & {*pair, *((leaves or {}).get(node) for node in pair)} for pair in bad)  # all are explained
    return [(suspect.kind, suspect.members, suspect.certain) for suspect in found]


def of(node: str, nodes: tuple[str, ...] = FOUR) -> set[tuple[str, str]]:
    return {pair for pair in combinations(nodes, 2) if node in pair}


def across(leaf: str, leaves: dict[str, str]) -> set[tuple[str, str]]:
    return {(a, b) for a, b in combinations(sorted(leaves), 2) if leaves[a] != leaves[b] and leaf in (leaves[a], leaves[b])}


@pytest.mark.parametrize(("bad", "said"), [
    (set(), []),
    (of("n3"), [("node", ("n3",), True)]),
    ({("n1", "n3")}, [("link", ("n1–n3",), True)]),
    ({("n1", "n3"), ("n2", "n4")}, [("link", ("n1–n3",), True), ("link", ("n2–n4",), True)]),
    (of("n1") | of("n3"), [("node", ("n1",), True), ("node", ("n3",), True)]),
    (of("n1") - {("n1", "n2")}, [("link", ("n1–n3",), True), ("link", ("n1–n4",), True)]),
    ({*combinations(FOUR, 2)}, [("node", FOUR, False)])])
def test_four_nodes(bad: set[tuple[str, str]], said: Named) -> None:
    assert named(FOUR, bad) == said


def test_two_nodes_cannot_be_told_apart_unless_one_has_nothing_good() -> None:
    assert named(("n1", "n2"), {("n1", "n2")}) == [("node", ("n1", "n2"), False)]
    [suspect] = of_pairs({("n1", "n2")}, {("n2", "n3")}, {})
    assert (suspect.kind, suspect.members, suspect.evidence) == ("node", ("n1",), "between n1 and n2")


def test_uplinks() -> None:
    assert named(FOUR, across("s1", LEAVES), LEAVES) == [("uplink", ("s1", "s2"), False)]
    assert named(tuple(THREE), across("s2", THREE), THREE) == [("uplink", ("s2",), True)]
    everything = across("s1", THREE) | across("s2", THREE)
    assert named(tuple(THREE), everything, THREE) == [("uplink", ("s1", "s2", "s3"), False)]


def test_an_uplink_is_not_blamed_for_its_only_node_or_for_what_is_bad_inside() -> None:
    alone = {"n1": "s1", "n2": "s2", "n3": "s2"}
    assert named(("n1", "n2", "n3"), {("n1", "n2"), ("n1", "n3")}, alone) == [("node", ("n1",), True)]
    assert named(FOUR, across("s1", LEAVES) | {("n1", "n2")}, LEAVES) == [("node", ("n1",), True), ("node", ("n2",), True)]


@given(st.integers(3, 12), st.data())
def test_a_single_bad_node_or_link_is_always_named(count: int, data: st.DataObject) -> None:
    nodes = tuple(f"n{number:02}" for number in range(count))
    bad = data.draw(st.sampled_from(nodes))
    assert named(nodes, of(bad, nodes)) == [("node", (bad,), True)]
    if count > 3:
        pair = data.draw(st.sampled_from([*combinations(nodes, 2)]))
        assert named(nodes, {pair}) == [("link", ("–".join(pair),), True)]
