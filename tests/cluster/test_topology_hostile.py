"""Topologies as sites write them and fabrics as they are built: what Slurm's parser takes and refuses, what is no fat tree."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import pytest
from click.testing import CliRunner
from ibnet import Fabric, clos
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.cluster import command
from hpc_mp.cluster.topology.model import TopologyReading, listed, only
from hpc_mp.cluster.topology.readers import read

MAN_PAGE = table(__file__, "topology_hostile.toml", "man_page")


def test_a_topology_that_is_not_understood_is_never_written_as_another() -> None:
    assert any(note.startswith("topo5 has torus3d, which defines no switches and is ignored")
               for note in read(MAN_PAGE, "file", "slurm").notes)
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
