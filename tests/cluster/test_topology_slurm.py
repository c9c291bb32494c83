"""Written topologies are taken by a real Slurm, which then says of them what we meant; and a belief that is wrong is found out
by a real measurement."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ibnet import clos
from slurm_lab import faults
from slurm_lab.chroot import built, why_not_built
from slurm_lab.lab import Lab, wait_until
from slurm_lab.why_not import why_not
from survey_plants import BASE

from hpc_mp.cluster.topology import Switch, SwitchTree, Topology, read_topologies, read_topology
from hpc_mp.cluster.topology.readers import read
from hpc_mp.cluster.topology.slurm_text import to_conf

TREES = {
    "fabric": read(clos([[["n1", "n2"], ["n3"]], [["n4"]]], rails=2).text(), "fabric").topologies[0],
    "names to mend": Topology(kind="tree", switches=(Switch("leaf one", ("n1", "n2", "n4")), Switch("leaf;two", ("n3",)),
                                                     Switch("the root", (), ("leaf one", "leaf;two")))),
}


@pytest.fixture
def settings(lab: Lab) -> Iterator[Path]:
    """topology.conf of the shared lab, put back afterwards."""
    path = lab.directory / "etc" / "topology.conf"
    before = path.read_text()
    yield path
    path.write_text(before)
    reconfigure(lab, read_topology(before))


def reconfigure(lab: Lab, meant: SwitchTree) -> Topology:
    """What Slurm says of its topology.conf, once it has read it."""
    lab.run(["scontrol", "reconfigure"], check=True)

    def said() -> tuple[Topology, ...]:
        return read_topologies(lab.run(["scontrol", "show", "topology"]).stdout)

    wait_until(lambda: [each.tree for each in said()] == [meant], "the topology that was written")
    return said()[0]


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_what_slurm_then_knows(lab: Lab, settings: Path, name: str) -> None:
    text = to_conf(TREES[name], ["a header", "# with a mark"])
    assert read_topology(text).above.keys() == {"n1", "n2", "n3", "n4"}
    settings.write_text(text)
    known = reconfigure(lab, read_topology(text))
    assert {switch.name for switch in known.switches} == {switch.name for switch in read_topologies(text)[0].switches}
    assert "n" in lab.run(["srun", "--nodes=4", "hostname"], check=True, timeout=60).stdout, "jobs span all leaves"


class Believing(Lab):
    """A lab whose Slurm has another topology.conf than its cables."""

    def __init__(self, nodes: int, text: str, **more: object) -> None:
        super().__init__(nodes, **more)  # type: ignore[arg-type]
        self.text = text

    def files(self) -> dict[str, str]:
        return {**super().files(), "topology.conf": self.text}


def believe(leaves: Sequence[Sequence[str]]) -> str:
    switches = [Switch(f"s{i}", tuple(leaf)) for i, leaf in enumerate(leaves, 1)]
    return to_conf(Topology(kind="tree", switches=(*switches, Switch("spine", (), tuple(switch.name for switch in switches)))))


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("cables", "code"), [((("n1", "n3"), ("n2", "n4")), 1), ((("n1", "n2"), ("n3", "n4")), 0)])
def test_slurm_against_a_real_measurement(cables: Sequence[Sequence[str]], code: int) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with Believing(4, believe((("n1", "n2"), ("n3", "n4"))), leaves=cables) as lab:
        lab.shape(BASE)
        environ = {"XDG_STATE_HOME": str(lab.share / "state")}
        hpc_mp = [sys.executable, "-m", "hpc_mp"]
        with faults.slow_uplink(lab, 1, "100mbit"):
            lab.run([*hpc_mp, "doctor", "--nodelist", "n[1-4]"], timeout=300, environ=environ)
        done = lab.run([*hpc_mp, "cluster", "topology", "--check", "--json"], timeout=60, environ=environ)
        assert done.returncode == code, done.stdout + done.stderr
        document = json.loads(done.stdout)
        assert document["verdict"] == ("disagrees" if code else "agrees")
        assert {node for odd in document["odd"] for node in odd["nodes"]} == ({"n2", "n3"} if code else set())
        written = lab.run([*hpc_mp, "cluster", "topology", "--from", "measured", "--to", "tree"], timeout=60, environ=environ,
                          check=True).stdout
        tree = read_topology(written)
        assert {frozenset(host for host in tree.above if tree.leaf(host) == leaf) for leaf in map(tree.leaf, tree.above)} == {
            frozenset(leaf) for leaf in cables}
        said = lab.run([*hpc_mp, "cluster", "describe", "--json"], environ=environ, timeout=60, check=True).stdout
        assert ("topology-wrong" in {finding["code"] for finding in json.loads(said)["findings"]}) == bool(code)


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_blocks_are_what_slurm_24_then_knows() -> None:
    if reason := why_not() or why_not_built():
        pytest.skip(reason)
    text = (Path(__file__).parents[1] / "topology_sources" / "cliques-table.txt").read_text(encoding="utf-8")
    names = dict(zip(("gb-1", "gb-2", "gb-10", "gb-3", "gb-4", "gb-5", "gb-6"), (f"n{i}" for i in range(1, 8)), strict=True))
    for old in sorted(names, key=len, reverse=True):
        text = text.replace(f"{old}:", f"{names[old]}:").replace(f"{old},", f"{names[old]},").replace(f"{old} ", f"{names[old]} ")
    known = read(text, "cliques")
    topology = replace(known.topologies[0], sizes=(2, 4))
    written = to_conf(topology, known.notes)
    with Believing(7, written, chroot=built(), patience=120, overrides={"TopologyPlugin": "topology/block"}) as lab:
        said = read_topologies(lab.run(["scontrol", "show", "topology"], check=True).stdout)
        assert [(each.kind, each.switches, each.sizes) for each in said] == [("block", topology.switches, (2, 4))]
        assert said[0].tree == topology.tree, "blocks are joined as Slurm joins them"
        assert lab.run(["srun", "--nodes=4", "hostname"], check=True, timeout=120).stdout.count("n") == 4
        refused = lab.run(["srun", "--nodes=7", "hostname"], timeout=120)  # of a block of 3 nodes, 2 count towards larger jobs
        assert "Requested node configuration is not available" in refused.stderr
