"""Topologies as sites write them and fabrics as they are built: what Slurm's parser takes and refuses, what is no fat tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import pytest
from click.testing import CliRunner
from ibnet import Fabric, clos

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.cluster import command
from hpc_mp.cluster.topology import read_topologies
from hpc_mp.cluster.topology.model import only
from hpc_mp.cluster.topology.readers import read
from hpc_mp.cluster.topology.reading import TopologyReading, listed

MAN_PAGE = """\
---
- topology: topo1
  cluster_default: true
  tree:
    switches:
      - switch: s1
        nodes: node[01-02]
- topology: topo3a
  cluster_default: false
  flat:
    alpha_step_rank: true
- topology: topo5
  cluster_default: false
  torus3d:
    toruses:
      - name: pod1
        dims: {x: 4, y: 4, z: 2}
        nodes: node[01-32]
"""


def hosts(text: str) -> dict[str, tuple[str, ...]]:
    (topology,) = read_topologies(text)
    return {switch.name: switch.hosts for switch in topology.switches}


# --- topology.conf, as Slurm's parse_config.c reads it ---------------------------------------------------------------


@pytest.mark.parametrize(("text", "found"), [
    ("SwitchName = s1 Nodes = n[1-2]\n", {"s1": ("n1", "n2")}),
    ('switchname=s1 nodes="n[1-2]"\r\n', {"s1": ("n1", "n2")}),
    ("SwitchName=s1 Nodes=n1,\\\nn2\n", {"s1": ("n1", "n2")}),
    ("SwitchName=s1 \\  \n  Nodes=n1\n", {"s1": ("n1",)}),
    ("# made in C:\\\nSwitchName=s1 Nodes=n1\nSwitchName=s2 Nodes=n2\n", {"s1": ("n1",), "s2": ("n2",)}),
    ("SwitchName=s1 Nodes=n1 # not n2 \\\nSwitchName=s2 Nodes=n3\n", {"s1": ("n1",), "s2": ("n3",)}),
    ("SwitchName=s1 Nodes=rack[1-2]n[01-02] LinkSpeed=100\n", {"s1": ("rack1n01", "rack1n02", "rack2n01", "rack2n02")}),
])
def test_blanks_quotes_comments_and_continued_lines_are_slurms(text: str, found: dict[str, tuple[str, ...]]) -> None:
    assert hosts(text) == found


@pytest.mark.parametrize(("text", "words"), [
    ("Include rack1.conf\nSwitchName=s1 Nodes=n1\n", "line 1 of the topology, 'Include rack1.conf': names another file"),
    ("SwitchName=s1 Nodes=n1\n\n  include rack1.conf\n", "line 3 of the topology"),
    ("SwitchName=s1 Nodes=n1\nSwitchName=s1 Nodes=n2\n", "s1 in the topology: is defined twice"),
    ("BlockName=b1 Nodes=n1\nBlockName=b1 Nodes=n2\nBlockSizes=1\n", "b1 in the topology: is defined twice"),
    ("- topology: t\n  tree: {switches: [{switch: a, nodes: n1}, {switch: a, nodes: n2}]}\n", "a in the topology: is defined"),
    ("SwitchName=s1 Nodes=n1\nBlockName=b1 Nodes=n1\n", "the topology: names both switches and blocks"),
    ("- topology: t\n  tree: {switches: [{switch: a, nodes: n1}]}\n  block: {blocks: [{block: b, nodes: n1}]}\n",
     "topology t: is tree and block, but Slurm needs one"),
    ("- topology: t\n", "topology t: is of no kind"),
    ("- topology: t\n  flat: true\n- topology: t\n  flat: true\n", "t in the topology: is defined twice"),
    ("SwitchName=s1 Nodes=n1 rubbish\n", "line 1 of the topology"),
    ("SwitchName=s1 Nodes= Switches=s2\n", "line 1 of the topology"),
    ("- topology: t\n  tree: {switches: [{switch: a, children: [b, c]}]}\n", "Input should be a valid string"),
])
def test_what_slurm_does_not_start_with_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(HpcMpError) as error:
        read_topologies(text)
    assert words in str(error.value)


@pytest.mark.parametrize(("text", "note"), [
    ("SwitchName=s1 Nodes=n1\nSwitchName=top Switches=s1,s9\n", "top is above s9, which is not defined: Slurm refuses that"),
    ("SwitchName=s1 Nodes=n[1-4]\nSwitchName=s2 Nodes=n[4-8]\nSwitchName=top Switches=s[1-2]\n",
     "n4: in several leaves; the first counts here"),
    ("BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[4-7]\nBlockSizes=4\n", "n4: in several blocks; the first counts here"),
    ("SwitchName=s1 Nodes=n1\nSwitchName=top Switches=s1 Nodes=n2\n", "top has both switches and nodes: Slurm refuses that"),
    ("BlockName=b1 Nodes=n[1-4]\nBlockSizes=2,12\n", "BlockSizes has 12, which is not a power of two times 2: Slurm refuses"),
    (MAN_PAGE, "topo5 has torus3d, which defines no switches and is ignored"),
])
def test_what_slurm_takes_otherwise_than_it_is_written_is_said(text: str, note: str) -> None:
    assert any(each.startswith(note) for each in read(text, "file", "slurm").notes)
    assert read("SwitchName=s1 Nodes=n1\nSwitchName=top Switches=s1\n", "file", "slurm").notes == ()


def test_a_topology_that_is_not_understood_is_never_written_as_another() -> None:
    done = CliRunner().invoke(command, ["topology", "-", "--to", "yaml"], input=MAN_PAGE)
    assert isinstance(done.exception, HpcMpError) and "topo3a: has options of flat" in str(done.exception) and not done.stdout
    plain = MAN_PAGE.replace("flat:\n    alpha_step_rank:", "flat:")
    torus = CliRunner().invoke(command, ["topology", "-", "--to", "yaml"], input=plain)
    assert "topo5: has torus3d" in str(torus.exception) and not torus.stdout


def test_a_switch_with_switches_and_nodes_is_written_as_slurm_takes_it() -> None:
    text = "SwitchName=s1 Nodes=n1\nSwitchName=top Switches=s1 Nodes=n2\n"
    done = CliRunner().invoke(command, ["topology", "-", "--to", "tree"], input=text)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert lines == ["SwitchName=s1 Nodes=n1", "SwitchName=top-nodes Nodes=n2", "SwitchName=top Switches=s1,top-nodes"]


def test_azslurm_that_has_left_out_every_block_says_so() -> None:
    text = "# Total number of blocks = 1\n# Number of Nodes in Block 1: 2\n# ClusterUUID and CliqueID: x 1\n" \
           "# Warning: Block 1 has less than 18 nodes, commenting out\n#BlockName=block_x 1 Nodes=n1,n2\nBlockSizes=18\n"
    known = read(text, "file")
    assert known.topologies == () and known.notes == ("n[1-2]: left out by azslurm, a block of fewer nodes than BlockSizes",)


# --- NVLink ---------------------------------------------------------------------------------------------------------

UUID = "5e797fc6-0f46-421a-8724-0e102c0f723c"


def test_one_domain_is_one_block_however_its_uuid_is_spelt() -> None:
    known = read(f"n1 {UUID} 3\nn2 {UUID.upper()} 3\nn3 N/A N/A\nn4 {UUID} 4\n", "file")
    assert [switch.hosts for switch in known.topologies[0].switches] == [("n1", "n2"), ("n4",)]
    assert known.notes == ("n3: in no NVLink domain, so in no block",)


def test_a_label_of_kubernetes() -> None:
    known = read(f"n1 {UUID}.32766\nn2 {UUID}.32766\nn3 {UUID}.1\n", "file")
    assert [switch.hosts for switch in known.topologies[0].switches] == [("n1", "n2"), ("n3",)]


@pytest.mark.parametrize("text", [f"n1: {UUID}\nn2: {UUID}\n", "n1: State : Completed\n", "", "[]"])
def test_a_text_without_any_clique_is_refused(text: str) -> None:
    with pytest.raises(HpcMpError, match="has no node's ClusterUUID and CliqueId"):
        read(text, "file", "cliques")


# --- InfiniBand ------------------------------------------------------------------------------------------------------


def fabric(leaves: Mapping[str, Sequence[str]], cables: Iterable[tuple[str, str]]) -> TopologyReading:
    """Hosts at their leaves with one adapter each, and cables between switches."""
    planned, cabled = Fabric(), list(cables)
    switches = {name: planned.add("S", f"MF0;{name}:MQM9700/U1") for name in dict.fromkeys((*leaves, *chain(*cabled)))}
    for leaf, hosts in leaves.items():
        for host in hosts:
            planned.cable(switches[leaf], planned.add("H", f"{host} mlx5_0"))
    for one, other in cabled:
        planned.cable(switches[one], switches[other])
    return read(planned.text(), "fabric.txt")


def nested(known: TopologyReading) -> object:
    """The tree as sets: of hosts at a leaf, of what is below at a switch."""
    (topology,) = known.topologies
    by_name = {switch.name: switch for switch in topology.switches}

    def below(name: str) -> object:
        switch = by_name[name]
        return frozenset(switch.hosts) if not switch.children else frozenset(map(below, switch.children))

    (top,) = topology.tops
    return below(top)


def test_three_storeys_of_a_fat_tree() -> None:
    pods = [[f"p{pod}l{leaf}" for leaf in range(3)] for pod in range(2)]
    leaves = {leaf: [f"{leaf}n{number}" for number in range(2)] for pod in pods for leaf in pod}
    up = [(leaf, f"p{pod}s{spine}") for pod, names in enumerate(pods) for leaf in names for spine in range(2)]
    over = [(f"p{pod}s{spine}", f"core{core}") for pod in range(2) for spine in range(2) for core in range(2)]
    assert nested(fabric(leaves, up + over)) == frozenset(
        frozenset(frozenset(leaves[leaf]) for leaf in names) for names in pods)


def test_groups_of_a_dragonfly_plus_are_joined_above_their_spines() -> None:
    groups = [[f"g{group}l{leaf}" for leaf in range(2)] for group in range(3)]
    leaves = {leaf: [f"{leaf}n{number}" for number in range(2)] for group in groups for leaf in group}
    up = [(leaf, f"g{group}s{spine}") for group, names in enumerate(groups) for leaf in names for spine in range(2)]
    across = [(f"g{one}s{spine}", f"g{other}s{spine}") for one in range(3) for other in range(one + 1, 3) for spine in range(2)]
    assert nested(fabric(leaves, up + across)) == frozenset(
        frozenset(frozenset(leaves[leaf]) for leaf in names) for names in groups)
    assert nested(fabric(leaves, [*up, ("g0s0", "top"), ("g1s0", "top"), ("g2s0", "top")])) == frozenset(
        frozenset(frozenset(leaves[leaf]) for leaf in names) for names in groups)


def test_leaves_that_are_cabled_to_each_other_alone() -> None:
    leaves = {"a": ["n1"], "b": ["n2"], "c": ["n3"]}
    assert nested(fabric(leaves, [("a", "b"), ("b", "c")])) == frozenset(frozenset(hosts) for hosts in leaves.values())


@pytest.mark.parametrize("astray", [
    {"n2 mlx5_2": "leaf03r2"}, {"gw1 HCA-1": "leaf01r0", "gw1 HCA-2": "leaf03r0"},
    {f"oss{leaf} HCA-{port}": f"leaf0{(leaf + port) % 4 + 1}r0" for leaf in range(4) for port in range(2)},
    {"ubuntu mlx5_0": "leaf02r0", "ubuntu mlx5_1": "leaf04r1"}])
def test_hosts_at_switches_of_several_leaves_join_none(astray: Mapping[str, str]) -> None:
    """A cable at the wrong leaf, a gateway, file servers at two leaves each, two hosts of one name."""
    pods = [[[f"n{4 * leaf + number}" for number in range(4)] for leaf in pod] for pod in ((0, 1), (2, 3))]
    planned = clos(pods, rails=4)
    switches = {name.split(";")[1].partition(":")[0]: identity for identity, name in planned.names.items() if ";" in name}
    for description, switch in astray.items():
        old = [identity for identity, name in planned.names.items() if name == description]
        planned.cables = [cable for cable in planned.cables if not set(old) & set(cable)]
        planned.cable(planned.add("H", description), switches[switch])
    known = read(planned.text(), "fabric.txt")
    guests = {description.split()[0] for description in astray} - {host for pod in pods for leaf in pod for host in leaf}
    topology = only(known.topologies[0], {*known.topologies[0].hosts} - guests)
    assert nested(TopologyReading((topology,), "")) == frozenset(frozenset(map(frozenset, pod)) for pod in pods)
    assert any(note.startswith(f"{listed({name.split()[0] for name in astray})}: connected to") for note in known.notes)
