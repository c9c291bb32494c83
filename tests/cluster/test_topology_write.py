"""Topologies written for Slurm: they are read back as they were, and stand up to what Slurm's documentation asks."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.topology import Switch, Topology, read_topologies
from hpc_mp.cluster.topology.model import only
from hpc_mp.cluster.topology.write import to_conf, to_yaml

NAMES = ("s{}", "leaf-{:03}", "nvl-{:08x}-32766", "a{}b", "sw0{}")
HOSTS = ("n{}", "gpu-{:04}", "a0b{}", "r{}-n1")


@st.composite
def trees(draw: st.DrawFn) -> Topology:
    """Leaves with one to four hosts, and up to two storeys above, with or without a root."""
    numbers = draw(st.lists(st.integers(0, 2000), min_size=1, max_size=16, unique=True))
    hosts = [draw(st.sampled_from(HOSTS)).format(number) for number in numbers]
    pattern = draw(st.sampled_from(NAMES))
    names = iter(pattern.format(number) for number in draw(st.permutations(range(40))))
    switches: list[Switch] = []
    while hosts:
        count = draw(st.integers(1, 4))
        switches.append(Switch(next(names), tuple(hosts[:count])))
        hosts = hosts[count:]
    front = [switch.name for switch in switches]
    for _ in range(draw(st.integers(0, 2))):
        width, above = draw(st.integers(1, 3)), []
        for first in range(0, len(front), width):
            switches.append(Switch(next(names), (), tuple(front[first : first + width])))
            above.append(switches[-1].name)
        front = above
    return Topology(kind="tree", switches=tuple(switches), default=True)


@st.composite
def blocks(draw: st.DrawFn) -> Topology:
    leaves = tuple(switch for switch in draw(trees()).switches if switch.hosts)
    base = min(len(leaf.hosts) for leaf in leaves)
    sizes = tuple(base << power for power in sorted(draw(st.sets(st.integers(1, 3)))))
    return Topology(kind="block", switches=leaves, sizes=(base, *sizes), default=True)


# --- there and back --------------------------------------------------------------------------------------------------


@given(st.one_of(trees(), blocks()), st.lists(st.text(max_size=40), max_size=3))
@example(Topology(kind="tree", switches=(Switch("s", ("n1",)),), default=True), ["made from C:\\"])
def test_topology_conf_is_read_back_as_it_was(topology: Topology, header: list[str]) -> None:
    assert read_topologies(to_conf(topology, header)) == (topology,)


@given(st.lists(st.one_of(trees(), blocks()), min_size=1, max_size=3), st.integers(0, 2))
def test_topology_yaml_is_read_back_as_it_was(found: list[Topology], default: int) -> None:
    named = tuple(Topology(f"t{i}", each.kind, each.switches, each.sizes, default=i == default) for i, each in enumerate(found))
    text = to_yaml((*named, Topology("flat", "flat")), ["a header"])
    assert read_topologies(text) == (*named, Topology("flat", "flat"))
    File.validate_text(text)


def test_rings_in_yaml() -> None:
    rings = Topology("r", "ring", (Switch("r1", ("n2", "n1")),), default=True)
    text = to_yaml([rings])
    assert read_topologies(text) == (rings,)
    File.validate_text(text)


# --- what Slurm's documentation asks of topology.yaml ----------------------------------------------------------------

Text = Annotated[str, Field(min_length=1, max_length=64)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class YamlSwitch(Strict):
    switch: Text
    children: str | None = None
    nodes: str | None = None


class YamlTree(Strict):
    switches: list[YamlSwitch] = Field(min_length=1)


class YamlBlock(Strict):
    block: Text
    nodes: str | None = None


class YamlBlocks(Strict):
    block_sizes: list[int] = Field(min_length=1)
    blocks: list[YamlBlock] = Field(min_length=1)

    @model_validator(mode="after")
    def sizes(self) -> YamlBlocks:
        base = self.block_sizes[0]
        powers = [size / base for size in self.block_sizes]
        assert all(power in (1, 2, 4, 8, 16, 32, 64) for power in powers) and powers == sorted(powers), "not powers of two"
        assert all(len(expand(block.nodes)) >= base for block in self.blocks if block.nodes), "a block smaller than the base"
        return self


class YamlRing(Strict):
    ring: Text
    nodes: str


class YamlRings(Strict):
    rings: list[YamlRing]


class Entry(Strict):
    topology: Text
    cluster_default: bool = False
    tree: YamlTree | None = None
    block: YamlBlocks | None = None
    ring: YamlRings | None = None
    flat: Literal[True] | None = None

    @model_validator(mode="after")
    def one_kind(self) -> Entry:
        assert [self.tree, self.block, self.ring, self.flat].count(None) == 3, "not exactly one type"
        return self


class File(Strict):
    """https://slurm.schedmd.com/topology.yaml.html"""

    entries: list[Entry] = Field(min_length=1)

    @classmethod
    def validate_text(cls, text: str) -> File:
        tree = yaml.safe_load(text)
        for entry in tree:
            assert next(iter(entry)) == "topology", "it must be the first attribute"
        return cls(entries=tree)

    @model_validator(mode="after")
    def whole(self) -> File:
        names = [entry.topology for entry in self.entries]
        assert len(set(names)) == len(names) and sum(entry.cluster_default for entry in self.entries) <= 1
        for entry in self.entries:
            below = [each.switch for each in entry.tree.switches] if entry.tree else []
            assert len(set(below)) == len(below)
            children = [child for each in (entry.tree.switches if entry.tree else ()) for child in expand(each.children or "")]
            assert set(children) <= set(below) and len(set(children)) == len(children)
        return self


@pytest.mark.parametrize("text", [
    "- topology: t\n  block: {block_sizes: [2, 6], blocks: [{block: b, nodes: 'n[1-2]'}]}\n",
    "- topology: t\n  block: {block_sizes: [4], blocks: [{block: b, nodes: 'n[1-2]'}]}\n",
    "- topology: t\n  flat: true\n  tree: {switches: [{switch: s, nodes: n1}]}\n",
    "- topology: t\n  tree: {switches: [{switch: s, children: x}]}\n",
    "- cluster_default: true\n  topology: t\n  flat: true\n",
])
def test_the_schema_refuses_what_slurm_refuses(text: str) -> None:
    with pytest.raises((ValidationError, AssertionError)):
        File.validate_text(text)


# --- what Slurm starts with ------------------------------------------------------------------------------------------

PLACES = "BlockName=b1 Nodes=n[1-3]\nBlockName=b2\nBlockName=b3 Nodes=n[7-9]\nBlockName=b4 Nodes=n[10-12]\nBlockSizes=3,6\n"


def test_a_block_without_nodes_keeps_its_place() -> None:
    """Which blocks are joined is counted by it; a tree needs no such place, and Slurm before 25.05 does not start with one."""
    topology = read_topologies(PLACES)[0]
    assert to_conf(topology) == PLACES
    assert read_topologies(to_yaml([topology]))[0].tree == topology.tree
    File.validate_text(to_yaml([topology]))
    assert only(topology, {"n1", "n7", "n10"}).tree.above["n7"][-1] == topology.tree.above["n7"][-1]
    assert to_conf(read_topologies("SwitchName=a Nodes=n1\nSwitchName=b\nSwitchName=c Switches=a,b\n")[0]) == (
        "SwitchName=a Nodes=n1\nSwitchName=c Switches=a\n")


def test_blocks_without_sizes_get_that_of_the_smallest() -> None:
    topology = Topology(kind="block", switches=(Switch("a", ("n1", "n2", "n3")), Switch("b"), Switch("c", ("n4", "n5"))))
    assert to_conf(topology).endswith("BlockSizes=2\n")
    File.validate_text(to_yaml([topology]))


@pytest.mark.parametrize(("sizes", "words"), [
    ((2, 6), "6 is not a power of two times 2"), ((2, 3), "3 is not a power"), ((4, 2), "2 is no"), ((0, 2), "0 is no")])
def test_wrong_sizes_are_refused(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        to_conf(Topology(kind="block", switches=(Switch("a", ("n1", "n2", "n3")),), sizes=sizes))


@given(trees(), st.data())
def test_some_nodes_only(topology: Topology, data: st.DataObject) -> None:
    nodes = data.draw(st.sets(st.sampled_from(topology.hosts)))
    kept = only(topology, nodes)
    assert set(kept.hosts) == nodes
    assert {host: kept.tree.above[host] for host in nodes} == {host: topology.tree.above[host] for host in nodes}
    assert all(switch.hosts or switch.children for switch in kept.switches)


# --- names and refusals ----------------------------------------------------------------------------------------------


def test_names_that_slurm_would_misread_are_mended() -> None:
    topology = Topology(kind="tree", default=True, switches=(
        Switch("leaf one", ("n1",)), Switch("leaf,one", ("n2",)), Switch("x" * 80, (), ("leaf one", "leaf,one"))))
    assert to_conf(topology) == (f"SwitchName=leaf-one Nodes=n1\nSwitchName=leaf-one-2 Nodes=n2\n"
                                 f"SwitchName={'x' * 64} Switches=leaf-one,leaf-one-2\n")
    File.validate_text(to_yaml([topology]))


def test_a_header_cannot_leave_its_comment() -> None:
    text = to_conf(Topology(kind="tree", switches=(Switch("s", ("n1",)),)), ["from x\nSwitchName=evil Nodes=n9"])
    assert text == "# from x\n# SwitchName=evil Nodes=n9\nSwitchName=s Nodes=n1\n"


def test_nothing_is_not_written() -> None:
    with pytest.raises(HpcMpError, match="has no node"):
        to_conf(Topology(kind="tree", switches=(Switch("s", (), ("t",)),)))
    tree = Topology(kind="tree", switches=(Switch("s", ("n1",)),))
    with pytest.raises(HpcMpError, match="two have the same name"):
        to_yaml([tree, tree])
