"""Switches: every form of Slurm's topology, distances, and the order of hosts."""

import tomllib
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_lab.lab import Lab

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.topology import (
    SwitchTree,
    crossings,
    from_addresses,
    load_topology,
    order_hosts,
    read_topologies,
    read_topology,
)
from hpc_mp.cluster.topology.model import Switch, from_switches
from hpc_mp.cluster.topology.readers import read

TEXTS = tomllib.loads(Path(__file__).with_name("topologies.toml").read_text(encoding="utf-8"))
ABOVE = TEXTS["above"]
FORMS = {row["name"]: (row["text"], ABOVE[row["is"]] if isinstance(row["is"], str) else row["is"]) for row in TEXTS["forms"]}


def above(tree: SwitchTree) -> dict[str, list[str]]:
    return {host: list(chain) for host, chain in tree.above.items()}


@pytest.mark.parametrize(("text", "chains"), FORMS.values(), ids=FORMS)
def test_all_forms_of_a_topology(text: str, chains: dict[str, list[str]]) -> None:
    assert above(read_topology(text)) == chains


@pytest.mark.parametrize("row", TEXTS["hosts"], ids=lambda row: row["text"])
def test_blanks_quotes_comments_and_continued_lines_are_slurms(row: dict[str, Any]) -> None:
    (topology,) = read_topologies(row["text"])
    assert {switch.name: list(switch.hosts) for switch in topology.switches} == row["is"]


@pytest.mark.parametrize("row", TEXTS["refused"], ids=lambda row: row["text"])
def test_what_slurm_does_not_start_with_is_refused_with_its_place(row: dict[str, Any]) -> None:
    with pytest.raises(HpcMpError) as refused:
        read_topology(row["text"])
    assert [words for words in row["says"] if words not in str(refused.value)] == []


@pytest.mark.parametrize("row", TEXTS["noted"], ids=lambda row: row["text"])
def test_what_slurm_takes_otherwise_than_it_is_written_is_said(row: dict[str, Any]) -> None:
    assert any(note.startswith(row["says"]) for note in read(row["text"], "file", "slurm").notes)


def test_a_sound_topology_has_no_notes() -> None:
    assert read("SwitchName=s1 Nodes=n1\nSwitchName=top Switches=s1\n", "file", "slurm").notes == ()


def test_addresses_of_hosts() -> None:
    pattern = "switch.switch.node"
    assert from_addresses((f"spine.s{(i + 1) // 2}.n{i}", pattern) for i in (1, 2, 3, 4)).above == {
        host: tuple(chain) for host, chain in ABOVE["tree"].items()}
    assert from_addresses([("b8.tux1", "block.node"), ("n1", "node"), ("s1.n2.cluster.org", "switch.node")]).above == {
        "tux1": ("b8",), "n1": (), "n2.cluster.org": ("s1",)}


@pytest.mark.parametrize(("address", "pattern"), [
    ("n1", "switch.node"), ("s1.n1", "switch.switch"), ("", ""), ("s1.", "switch.node")])
def test_addresses_that_do_not_fit_their_pattern(address: str, pattern: str) -> None:
    with pytest.raises(HpcMpError, match="does not match"):
        from_addresses([(address, pattern)])


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text(FORMS["topology.conf"][0])
    assert above(load_topology(file)) == ABOVE["tree"]
    with pytest.raises(HpcMpError, match="cannot be read"):
        load_topology(tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(HpcMpError, match="not UTF-8"):
        load_topology(file)


def test_a_real_slurm_says_where_its_hosts_are(lab: Lab) -> None:
    said = lab.run(["scontrol", "show", "topology"], check=True).stdout
    leaves = {host: tree.leaf(host) for tree in [read_topology(said)] for host in tree.above}
    assert len(set(leaves.values())) == 2
    told = lab.run(["srun", f"--nodes={len(leaves)}", "bash", "-c", "echo $SLURM_TOPOLOGY_ADDR $SLURM_TOPOLOGY_ADDR_PATTERN"],
                   check=True).stdout
    addresses = [(address, pattern) for address, pattern in map(str.split, told.splitlines())]
    assert from_addresses(addresses).above == read_topology(said).above


@st.composite
def clusters(draw: st.DrawFn, most: int = 24) -> tuple[tuple[str, ...], SwitchTree]:
    """Hosts in any order under one to five leaves, with or without two spines; some may be unknown."""
    leaf = draw(st.lists(st.integers(-1, 4), min_size=1, max_size=most))
    switches = [Switch(f"s{number}", tuple(f"h{i}" for i, at in enumerate(leaf) if at == number)) for number in range(5)]
    if draw(st.booleans()):
        switches += [Switch("a", children=("s0", "s1", "s2")), Switch("b", children=("s3", "s4"))]
    return tuple(draw(st.permutations([f"h{i}" for i in range(len(leaf))]))), from_switches(switches)


@given(clusters())
def test_an_order_is_a_permutation_and_never_worse_than_the_given_one(cluster: tuple[tuple[str, ...], SwitchTree]) -> None:
    hosts, tree = cluster
    ordered = order_hosts(hosts, tree)
    assert sorted(ordered) == sorted(hosts)
    assert crossings(ordered, tree) <= crossings(hosts, tree)
    assert order_hosts(ordered, tree) == ordered  # what is ordered stays

    def whim(order: Sequence[str]) -> tuple[float, ...]:
        return (hash(tuple(order)) % 97,)

    assert whim(order_hosts(hosts, tree, whim)) <= whim(hosts)


@given(clusters(most=6))
def test_an_order_is_the_best_or_next_to_it(cluster: tuple[tuple[str, ...], SwitchTree]) -> None:
    hosts, tree = cluster
    best = min(crossings(order, tree) for order in permutations(hosts))
    found = crossings(order_hosts(hosts, tree), tree)
    assert found == best if len(hosts) in (1, 2, 4) else found <= best + 3


@given(st.integers(1, 5), st.integers(1, 8), st.randoms(use_true_random=False))
def test_equal_leaves_are_put_together(leaves: int, size: int, random: Random) -> None:
    hosts = [f"h{leaf}-{i}" for leaf in range(leaves) for i in range(size)]
    tree = SwitchTree({host: (host.partition("-")[0], "spine") for host in hosts})
    random.shuffle(hosts)
    ordered = order_hosts(hosts, tree)
    assert len({tree.leaf(host) for host in ordered[:size]}) == 1
    assert crossings(ordered, tree) == crossings(sorted(hosts), tree)


def test_orders_by_hand() -> None:
    tree = read_topology("SwitchName=s1 Nodes=n[1,3]\nSwitchName=s2 Nodes=n[2,4]\nSwitchName=top Switches=s[1-2]")
    assert order_hosts(("n1", "n2", "n3", "n4"), tree) == ("n1", "n3", "n2", "n4")
    assert order_hosts(("n3", "n1", "n4", "n2"), tree) == ("n3", "n1", "n4", "n2")  # stable
    assert order_hosts(("n1", "n2", "n3", "n4"), SwitchTree()) == ("n1", "n2", "n3", "n4")  # nothing is known
    assert order_hosts((), tree) == ()
    # 3 + 2 + 1 + 1 + 1 hosts: in blocks of two, leaf by leaf aa ab bc de crosses three times, in pieces aa bb ac de twice
    tree = read_topology("".join(f"SwitchName={leaf} Nodes={leaf}[1-3]\n" for leaf in "abcde"))
    together, apart = ("a1", "a2", "a3", "b1", "b2", "c1", "d1", "e1"), ("c1", "a1", "d1", "b1", "a2", "e1", "b2", "a3")
    assert crossings(together, tree) == 3 + 4 + 4
    assert crossings(order_hosts(apart, tree), tree) == 2 + 4 + 4


def test_an_order_near_the_first_one_found_may_be_cheaper() -> None:
    leaf = {**dict.fromkeys(range(7), ("s0", "a")), **dict.fromkeys((7, 19), ("s1", "a")), 10: ("s3", "b"),
            **dict.fromkeys(range(11, 19), ("s4", "b"))}
    tree = SwitchTree({f"h{host}": chain for host, chain in leaf.items()})
    once = order_hosts([f"h{host}" for host in range(20)], tree)
    assert order_hosts(once, tree) == once


def test_crossings_by_hand() -> None:
    tree = SwitchTree({"a": ("s1", "p"), "b": ("s1", "p"), "c": ("s2", "p"), "d": ("s2", "p")})
    # Blocks of two and of four, at the leaves and at the spine: of four, two leaves are spanned.
    assert crossings("abcd", tree) == 1
    assert crossings("acbd", tree) == 3
    assert crossings("ab", SwitchTree()) == 1  # unknown hosts stand alone
