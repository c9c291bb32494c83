"""Sources of topologies: what each prints, read from recorded and rebuilt texts and from planned fabrics."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ibnet import Fabric, clos
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.topology import Switch, Topology, read_topology
from hpc_mp.cluster.topology.ibnetdiscover import host_of, switch_name
from hpc_mp.cluster.topology.model import LONGEST, legal
from hpc_mp.cluster.topology.readers import SOURCES, read

TEXTS = Path(__file__).parents[1] / "topology_sources"
UUID = "b78ed242-7b98-426f-b194-b76b8899f4ec"


def of_file(name: str, kind: str | None = None) -> tuple[Topology, tuple[str, ...]]:
    known = read((TEXTS / name).read_text(encoding="utf-8"), name, kind)
    (topology,) = known.topologies
    return topology, known.notes


def plan(topology: Topology) -> dict[str, tuple[str, ...]]:
    return {switch.name: switch.hosts or switch.children for switch in topology.switches}


@pytest.mark.parametrize("path", sorted(TEXTS.glob("*.txt")), ids=lambda path: path.name)
def test_every_text_says_where_it_is_from_and_is_known_by_its_looks(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert any(line.startswith(("# recorded: ", "# rebuilt: ")) for line in text.splitlines()[:3])
    kind = {"scontrol": "slurm"}.get(path.name.partition("-")[0], path.name.partition("-")[0])
    assert next(name for name, (looks_like, _) in SOURCES.items() if looks_like(text)) == kind
    assert read(text, "x").origin == f"{kind} (x)"


def test_scontrol() -> None:
    topology, notes = of_file("scontrol-22.05-tree.txt")
    assert topology == Topology(kind="tree", default=True, switches=(
        Switch("s1", ("n1", "n2")), Switch("s2", ("n3", "n4")), Switch("spine", (), ("s1", "s2"))))
    assert notes == ()
    topology, _ = of_file("scontrol-24.11-block.txt")
    assert (topology.kind, topology.sizes) == ("block", (1, 2, 4))
    assert plan(topology) == {"b1": ("n1", "n2"), "rack-b78ed242-32766": ("n3", "n4"), "b3": ("n5", "n6")}
    written = Topology(kind="block", switches=topology.switches, sizes=topology.sizes)
    assert written.tree == topology.tree, "blocks are joined as Slurm joins them"
    assert len(topology.tree.above["n5"]) == 2 and len(topology.tree.above["n1"]) == 3


def test_several_topologies_in_yaml() -> None:
    text = ("- topology: a\n  tree: {switches: [{switch: s, nodes: 'n[1-2]'}]}\n- topology: b\n  cluster_default: true\n  block: "
            "{block_sizes: [2], blocks: [{block: b1, nodes: 'n[1-2]'}]}\n- topology: c\n  flat: true\n"
            "- topology: r\n  ring: {rings: [{ring: r1, nodes: 'n[2,1]'}]}\n")
    found = read(text, "topology.yaml").topologies
    assert [(each.name, each.kind, each.default) for each in found] == [
        ("a", "tree", False), ("b", "block", True), ("c", "flat", False), ("r", "ring", False)]


# --- azslurm ---------------------------------------------------------------------------------------------------------


def test_azslurm_scale_sets_are_fabrics_of_their_own() -> None:
    topology, notes = of_file("azslurm-vmss.txt")
    assert plan(topology)["Standard_ND96isr_H100_v5_pg0"] == tuple(f"cluster-hpc-{i}" for i in (1, 2, 3, 10, 11))
    assert len(topology.tops) == 3
    assert any("share no InfiniBand" in note for note in notes) and any("starts no job across" in note for note in notes)


@pytest.mark.parametrize(("file", "switches", "sizes", "notes"), table(__file__, "topology_sources.toml", "sources"))
def test_files_of_several_sources(file: str, switches: dict[str, list[str]], sizes: list[int], notes: list[str]) -> None:
    topology, said = of_file(file)
    assert {name: list(below) for name, below in plan(topology).items()} == switches
    assert (list(topology.sizes), list(said)) == (sizes, notes)


def test_azslurm_blocks_with_a_blank_in_their_names() -> None:
    topology, notes = of_file("azslurm-nvlink.txt")
    assert topology.sizes == (2,)
    assert plan(topology) == {
        f"block_{UUID}_32766": tuple(f"ccw-1-3-gpu-{i}" for i in (14, 21, 60)),
        "block_cc79d754-915f-408b-b1c3-b8c3aa6668ab_32766": ("ccw-1-3-gpu-7", "ccw-1-3-gpu-43")}
    assert [note.partition(":")[0] for note in notes] == ["ccw-1-3-gpu-[2,5]", "ccw-1-3-gpu-31"]
    with pytest.raises(HpcMpError, match="must have the form KEY=VALUE"):  # which Slurm would not take either
        of_file("azslurm-nvlink.txt", "slurm")


# --- NVLink domains --------------------------------------------------------------------------------------------------


def test_cliques_of_nvidia_smi() -> None:
    topology, notes = of_file("cliques-smi.txt")
    assert plan(topology) == {"nvl-b78ed242-32766": ("gb-1", "gb-2")}
    assert [note.partition(":")[0] for note in notes] == ["gb-3"]


@pytest.mark.parametrize(("text", "blocks"), [
    (f"n1 {UUID} 3\nn2 {UUID.upper()} 3\nn3 N/A N/A\nn4 {UUID} 4\n", [("n1", "n2"), ("n4",)]),  # however its UUID is spelt
    (f"n1 {UUID}.32766\nn2 {UUID}.32766\nn3 {UUID}.1\n", [("n1", "n2"), ("n3",)]),  # a label of Kubernetes
    (f"a {UUID} 1\nb {UUID[:-1]}0 1\n", [("b",), ("a",)]),
    ("a N/A N/A\nb 00000000-0000-0000-0000-000000000000 0\n", [])])
def test_one_domain_is_one_block(text: str, blocks: list[tuple[str, ...]]) -> None:
    known = read(text, "x")
    switches = [switch for topology in known.topologies for switch in topology.switches]
    assert [switch.hosts for switch in switches] == blocks and len({switch.name for switch in switches}) == len(blocks)
    assert ("n3: in no NVLink domain, so in no block" in known.notes) == ("n3 N/A" in text)


NO_CLIQUE = "has no node's ClusterUUID and CliqueId"


@pytest.mark.parametrize(("text", "words"), [
    (f"n1: {UUID}\nn2: {UUID}\n", NO_CLIQUE), ("n1: State : Completed\n", NO_CLIQUE), ("", NO_CLIQUE),
    (f"a {UUID} 1\nnonsense\n", "line 2, 'nonsense'"),
    (f"a: ClusterUUID : {UUID}\n", "has 1 ClusterUUID and 0 CliqueId")])
def test_wrong_cliques_are_refused(text: str, words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        read(text, "x", "cliques")


# --- InfiniBand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("description", "host"), table(__file__, "topology_sources.toml", "hosts"))
def test_hosts_in_descriptions(description: str, host: str) -> None:
    assert host_of(description) == (host or None)


@pytest.mark.parametrize(("description", "name"), [
    ("MF0;leaf01:MQM8700/U1", "leaf01"), ("sw-ib-7", "sw-ib-7"), ("Quantum Mellanox Technologies", None), ("", None)])
def test_switches_in_descriptions(description: str, name: str | None) -> None:
    assert switch_name(description) == name


@st.composite
def pods(draw: st.DrawFn) -> list[list[list[str]]]:
    numbers = iter(range(1000))
    return [[[f"n{next(numbers)}" for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 3)))]
            for _ in range(draw(st.integers(1, 3)))]


@given(pods(), st.integers(1, 3), st.booleans())
def test_any_fat_tree_is_read_back(planned: list[list[list[str]]], rails: int, named: bool) -> None:
    known = read(clos(planned, rails, named=named).text(), "x", "ibnetdiscover")
    tree = known.topologies[0].tree
    leaves = [leaf for pod in planned for leaf in pod]
    for one in leaves:
        for other in leaves:
            assert (tree.leaf(one[0]) == tree.leaf(other[0])) == (one is other)
        assert len({tree.leaf(host) for host in one}) == 1
    assert len({tree.leaf(leaf[0]): (pod, leaf) for pod in range(len(planned)) for leaf in planned[pod]}) == len(leaves)
    for pod in planned:
        for leaf in pod[1:]:  # leaves of one pod meet at its spines, those of two pods at the cores
            assert tree.above[pod[0][0]][1] == tree.above[leaf[0]][1]
    if len(planned) > 1:
        deep = tree.above[planned[0][0][0]], tree.above[planned[1][0][0]]
        assert deep[0][-1] == deep[1][-1] and deep[0][0] != deep[1][0]
        assert not set(deep[0][:-1]) & set(deep[1][:-1])
    assert len(known.topologies[0].tops) == 1


def test_a_host_that_lacks_a_rail_stays_with_its_leaf() -> None:
    fabric = clos([[["a", "b"], ["c", "d"]]], rails=2)
    lost = next(identity for identity, name in fabric.names.items() if name == "b mlx5_1")
    fabric.cables = [cable for cable in fabric.cables if lost not in cable]
    assert plan(read(fabric.text(), "x").topologies[0])["leaf01r0-x2"] == ("a", "b")


def test_a_leaf_whose_one_rail_lost_its_uplinks_is_joined_by_the_other() -> None:
    fabric = clos([[["a", "b"], ["c", "d"]]], rails=2)
    lost = next(identity for identity, name in fabric.names.items() if ";leaf01r0:" in name)
    fabric.cables = [cable for cable in fabric.cables if lost not in cable or any(end.startswith("H") for end in cable)]
    topology = read(fabric.text(), "x").topologies[0]
    assert len(topology.tops) == 1 and topology.tree.above["a"][1:] == topology.tree.above["c"][1:] != ()


def test_fabrics_that_nothing_joins_stay_apart() -> None:
    fabric = Fabric()
    for hosts in (("a", "b"), ("c",)):
        switch = fabric.add("S", f"sw-{hosts[0]}")
        for host in hosts:
            fabric.cable(fabric.add("H", f"{host} HCA-1"), switch)
    known = read(fabric.text(), "x")
    assert plan(known.topologies[0]) == {"sw-a": ("a", "b"), "sw-c": ("c",)}
    assert any("no switch is above sw-a,sw-c" in note for note in known.notes)


def test_a_fabric_without_hosts_is_no_topology() -> None:
    fabric = Fabric()
    fabric.cable(fabric.add("H", "MT4123 ConnectX6   Mellanox Technologies"), fabric.add("S", "sw"))
    known = read(fabric.text(), "x")
    assert known.topologies == () and "node-name-map" in known.notes[-1]
    with pytest.raises(HpcMpError, match="names no InfiniBand switch"):
        read("Ca\t1 \"H-01\"\n", "x", "ibnetdiscover")


# --- all -------------------------------------------------------------------------------------------------------------


@given(st.text(max_size=90), st.lists(st.text(max_size=70)))
def test_names_are_legal_and_none_of_those_taken(name: str, others: list[str]) -> None:
    taken: list[str] = []
    for other in (*others, name, name):
        found = legal(other, taken)
        assert found not in taken and 0 < len(found) <= LONGEST
        assert all(letter.isascii() and (letter.isalnum() or letter in "._-") for letter in found)
        taken.append(found)
    assert legal("leaf-1.x_y") == "leaf-1.x_y"


FRAGMENTS = st.sampled_from([
    "SwitchName=", "BlockName=", "AggregatedBlock=", "RingName=", "BlockSizes=", "Nodes=", "Switches=", "n[1-4]", "s1", "s2",
    "n[", "[1-99999999]", "2,4", "0", ",", " ", "\n", "\\\n", "#", "=", "---\n", "- topology: ", "- topology: x\n", "  tree:\n",
    "  block:\n", "    switches:\n", "    blocks:\n", "      - switch: ", "        nodes: ", "&a ", "*a", "!!int ", "{", "}", "[",
    "]", "? ", ": ", "- ", "[" * 50, "²", "\0", "\t", "2001-99-99", "1" * 5000, "Switch 1 \"S-01\"", "[1] \"H-0a\"[1]", "node",
    " # \"n1 HCA-1\"", "\"pairs\"", f"n1 {UUID} 1", "n1: CliqueId : 3"])


@given(st.one_of(st.lists(FRAGMENTS, max_size=25).map("".join), st.text(max_size=100)))
@example("BlockName=b\nBlockSizes=²")
@example("- " * 2000)
@example(f"BlockName={'1' * 5000} Nodes=a\nBlockName={'2' * 5000} Nodes=b\nBlockSizes=1,2\n")
@example("[" * 500)
@example(f"- topology: {'1' * 5000}\n")
@example(f"{'1' * 5000}n1 {UUID} 1")
@example(f"{'1' * 5000}n1: CliqueId : 1")
@example(f"- topology: {'1' * 5000}\n  flat:\n" * 2)
@pytest.mark.parametrize("reader", [read_topology, lambda text: read(text, "x")], ids=["slurm", "any"])
def test_any_text_is_read_or_refused(reader: Callable[[str], object], text: str) -> None:
    try:
        reader(text)
    except HpcMpError as error:
        assert len(str(error)) < 2000


def test_a_text_of_no_kind_is_refused_with_all_kinds() -> None:
    with pytest.raises(HpcMpError, match=", ".join(SOURCES)):
        read("hello world\n", "x")
    with pytest.raises(HpcMpError, match="above itself"):
        read("SwitchName=a Switches=b\nSwitchName=b Switches=a Nodes=n\n", "x")


@pytest.mark.parametrize(("text", "apart"), table(__file__, "topology_sources.toml", "apart"))
def test_only_leaves_without_a_switch_in_common_are_apart(text: str, apart: tuple[str, ...]) -> None:
    known = read("".join(f"SwitchName=s{at} Nodes=n[{at}0-{at}9]\n" for at in (1, 2, 3)) + text, "topology.conf", "slurm")
    assert known.topologies[0].apart == tuple(apart)
    assert any("no switch is above" in note for note in known.notes) == bool(apart)
