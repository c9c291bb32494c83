"""Topologies written for Slurm: they are read back as they were, and stand up to what Slurm's documentation asks."""

from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.topology import Switch, Topology, read_topologies
from hpc_mp.cluster.topology.model import only
from hpc_mp.cluster.topology.slurm_text import to_conf, to_yaml

NAMES = ("s{}", "leaf-{:03}", "nvl-{:08x}-32766", "a{}b", "sw0{}")
HOSTS = ("n{}", "gpu-{:04}", "a0b{}", "r{}-n1")


@st.composite
def trees(draw: st.DrawFn) -> Topology:
    """Leaves with one to four hosts, and up to two storeys above, with or without a root."""
    numbers = draw(st.lists(st.integers(0, 2000), min_size=1, max_size=16, unique=True))
    hosts = [draw(st.sampled_from(HOSTS)).format(number) for number in numbers]
    pattern = draw(st.sampled_from(NAMES))
    names = iter(pattern.format(number) for number in draw(st.permutations(range(48))))
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
    validate(text)


def test_rings_in_yaml() -> None:
    rings = Topology("r", "ring", (Switch("r1", ("n2", "n1")),), default=True)
    text = to_yaml([rings])
    assert read_topologies(text) == (rings,)
    validate(text)


# --- what Slurm's documentation asks of topology.yaml ----------------------------------------------------------------


def record(name: str, **fields: Any) -> type[BaseModel]:
    return create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def some(kind: Any) -> tuple[Any, Any]:
    """A list of them, not empty."""
    return list[kind], Field(min_length=1)


NAME = (Annotated[str, Field(min_length=1, max_length=64)], ...)
LIST = (str | None, None)
TREE = record("Tree", switches=some(record("TreeSwitch", switch=NAME, children=LIST, nodes=LIST)))
BLOCK = record("Blocks", block_sizes=some(int), blocks=some(record("Block", block=NAME, nodes=LIST)))
RING = record("Rings", rings=some(record("Ring", ring=NAME, nodes=(str, ...))))
KINDS = {"tree": TREE, "block": BLOCK, "ring": RING, "flat": Literal[True]}
ENTRIES = TypeAdapter(list[record("Entry", topology=NAME, cluster_default=(bool, False),  # type: ignore[misc]
                                  **{name: (kind | None, None) for name, kind in KINDS.items()})])


def validate(text: str) -> None:
    """Refuse what https://slurm.schedmd.com/topology.yaml.html does not allow."""
    entries = yaml.safe_load(text)
    ENTRIES.validate_python(entries)
    names = [entry["topology"] for entry in entries]
    assert names and len(set(names)) == len(names) and sum(entry.get("cluster_default", False) for entry in entries) <= 1
    for entry in entries:
        assert next(iter(entry)) == "topology", "it must be the first attribute"
        assert len(entry.keys() & KINDS) == 1, "not exactly one type"
        switches = entry.get("tree", {}).get("switches", [])
        below = [switch["switch"] for switch in switches]
        children = [child for switch in switches for child in expand(switch.get("children", ""))]
        assert len(set(below)) == len(below) and set(children) <= set(below) and len(set(children)) == len(children)
        sizes = entry.get("block", {}).get("block_sizes", [1])
        assert all(size / sizes[0] in (1, 2, 4, 8, 16, 32, 64) for size in sizes) and sizes == sorted(sizes), "not powers of two"
        for block in entry.get("block", {}).get("blocks", []):
            assert "nodes" not in block or len(expand(block["nodes"])) >= sizes[0], "a block smaller than the base"


@pytest.mark.parametrize("text", table(__file__, "topology_write.toml", "refused"))
def test_the_schema_refuses_what_slurm_refuses(text: str) -> None:
    with pytest.raises((ValidationError, AssertionError)):
        validate(text)


# --- what Slurm starts with ------------------------------------------------------------------------------------------

PLACES = "BlockName=b1 Nodes=n[1-3]\nBlockName=b2\nBlockName=b3 Nodes=n[7-9]\nBlockName=b4 Nodes=n[10-12]\nBlockSizes=3,6\n"


def test_a_block_without_nodes_keeps_its_place() -> None:
    """Which blocks are joined is counted by it; a tree needs no such place, and Slurm before 25.05 does not start with one."""
    topology = read_topologies(PLACES)[0]
    assert to_conf(topology) == PLACES
    assert read_topologies(to_yaml([topology]))[0].tree == topology.tree
    validate(to_yaml([topology]))
    assert only(topology, {"n1", "n7", "n10"}).tree.above["n7"][-1] == topology.tree.above["n7"][-1]
    assert to_conf(read_topologies("SwitchName=a Nodes=n1\nSwitchName=b\nSwitchName=c Switches=a,b\n")[0]) == (
        "SwitchName=a Nodes=n1\nSwitchName=c Switches=a\n")


def test_blocks_without_sizes_get_that_of_the_smallest() -> None:
    topology = Topology(kind="block", switches=(Switch("a", ("n1", "n2", "n3")), Switch("b"), Switch("c", ("n4", "n5"))))
    assert to_conf(topology).endswith("BlockSizes=2\n")
    validate(to_yaml([topology]))


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
    validate(to_yaml([topology]))


def test_a_header_cannot_leave_its_comment() -> None:
    text = to_conf(Topology(kind="tree", switches=(Switch("s", ("n1",)),)), ["from x\nSwitchName=evil Nodes=n9"])
    assert text == "# from x\n# SwitchName=evil Nodes=n9\nSwitchName=s Nodes=n1\n"


def test_nothing_is_not_written() -> None:
    with pytest.raises(HpcMpError, match="has no node"):
        to_conf(Topology(kind="tree", switches=(Switch("s", (), ("t",)),)))
    tree = Topology(kind="tree", switches=(Switch("s", ("n1",)),))
    with pytest.raises(HpcMpError, match="two have the same name"):
        to_yaml([tree, tree])
