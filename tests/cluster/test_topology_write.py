"""Topologies written for Slurm: they are read back as they were, with names and sizes that Slurm takes."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.topology import Switch, Topology, read_topologies
from hpc_mp.cluster.topology.model import only
from hpc_mp.cluster.topology.write import to_conf

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


# --- what Slurm starts with ------------------------------------------------------------------------------------------

PLACES = "BlockName=b1 Nodes=n[1-3]\nBlockName=b2\nBlockName=b3 Nodes=n[7-9]\nBlockName=b4 Nodes=n[10-12]\nBlockSizes=3,6\n"


def test_a_block_without_nodes_keeps_its_place() -> None:
    """Which blocks are joined is counted by it; a tree needs no such place, and Slurm before 25.05 does not start with one."""
    topology = read_topologies(PLACES)[0]
    assert to_conf(topology) == PLACES
    assert only(topology, {"n1", "n7", "n10"}).tree.above["n7"][-1] == topology.tree.above["n7"][-1]
    assert to_conf(read_topologies("SwitchName=a Nodes=n1\nSwitchName=b\nSwitchName=c Switches=a,b\n")[0]) == (
        "SwitchName=a Nodes=n1\nSwitchName=c Switches=a\n")


def test_blocks_without_sizes_get_that_of_the_smallest() -> None:
    topology = Topology(kind="block", switches=(Switch("a", ("n1", "n2", "n3")), Switch("b"), Switch("c", ("n4", "n5"))))
    assert to_conf(topology).endswith("BlockSizes=2\n")


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


def test_a_header_cannot_leave_its_comment() -> None:
    text = to_conf(Topology(kind="tree", switches=(Switch("s", ("n1",)),)), ["from x\nSwitchName=evil Nodes=n9"])
    assert text == "# from x\n# SwitchName=evil Nodes=n9\nSwitchName=s Nodes=n1\n"


def test_nothing_is_not_written() -> None:
    with pytest.raises(HpcMpError, match="has no node"):
        to_conf(Topology(kind="tree", switches=(Switch("s", (), ("t",)),)))
