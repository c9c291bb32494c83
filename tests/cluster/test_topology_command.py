"""``hpc-mp cluster topology`` as a user calls it: files, standard input, a Slurm that answers as recorded, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import python_program
from measured import leaves, measure
from tables import table

from hpc_mp.cluster.bandwidth import LinkRates, where, write_measured
from hpc_mp.cluster.topology import read_topologies, read_topology

HERE = Path(__file__).parents[1]
TEXTS = HERE / "topology_sources"
ANSWERS = HERE / "golden" / "cluster"
TREE = TEXTS / "scontrol-22.05-tree.txt"

SCONTROL = table(__file__, "topology_command.toml", "scontrol")


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell in which scontrol answers as it was recorded, and nothing was measured yet."""
    programs = tmp_path / "bin"
    programs.mkdir()
    python_program(programs / "scontrol", SCONTROL.format(config=str(ANSWERS / "22.05.config"), topology=str(TREE)))
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path / "state")}


def hpc_mp(*words: str | Path, environ: dict[str, str] | None = None, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hpc_mp", "cluster", "topology", *map(str, words)], env=environ, input=given,
                          capture_output=True, text=True, timeout=60)


def note(environ: dict[str, str], measured: LinkRates) -> None:
    write_measured(where("lab", environ), measured)


def test_what_slurm_knows_is_shown_and_written(slurm: dict[str, str]) -> None:
    shown = hpc_mp(environ=slurm)
    assert shown.returncode == 0 and "├─ s1  2: n[1-2]" in shown.stdout and "└─ spine" in shown.stdout
    for target in ("tree", "yaml"):
        written = hpc_mp("--to", target, environ=slurm)
        assert written.returncode == 0 and "written by hpc-mp" in written.stdout.splitlines()[0]
        assert "from slurm (scontrol show topology)" in written.stdout
        tree = read_topology(written.stdout)
        assert [tree.leaf(f"n{i}") for i in (1, 2, 3, 4)] == ["s1", "s1", "s2", "s2"]
    document = json.loads(hpc_mp("--json", environ=slurm).stdout)
    (topology,) = document["topologies"]
    assert topology["switches"][0] == {"name": "s1", "switches": [], "nodes": ["n1", "n2"]}


def test_standard_input_a_kind_and_some_nodes() -> None:
    text = (TEXTS / "ibnetdiscover-fat-tree.txt").read_text()
    done = hpc_mp("-", "--from", "ibnetdiscover", "--to", "tree", "--nodes", "node018,gpu001,n9", given=text)
    assert done.returncode == 0
    assert done.stdout.endswith("SwitchName=leaf01 Nodes=node018\nSwitchName=leaf02 Nodes=gpu001\n"
                                "SwitchName=tier1 Switches=leaf[01-02]\n")
    assert "note: n9: not under a switch" in done.stderr and "# n9: not under a switch" in done.stdout


def test_blocks_and_notes_in_the_header() -> None:
    done = hpc_mp(TEXTS / "cliques-table.txt", "--to", "block")
    assert done.returncode == 0 and done.stdout.endswith("BlockSizes=2\n")
    assert "# h-[1-2]: in no NVLink domain, so in no block" in done.stdout
    (topology,) = read_topologies(done.stdout)
    assert [block.name for block in topology.switches] == ["nvl-b78ed242-32766", "nvl-cc79d754-1", "nvl-cc79d754-32766"]


def test_a_part_of_the_blocks_and_one_of_several_topologies() -> None:
    done = hpc_mp(TEXTS / "scontrol-24.11-block.txt", "--to", "block", "--nodes", "n[1-5]")
    assert done.returncode == 0 and "25.05" not in done.stderr and "BlockName=b3 Nodes=n5\n" in done.stdout
    done = hpc_mp(TEXTS / "cliques-table.txt", "--to", "block", "--nodes", "gb-[1,3-6]")
    assert "note: nvl-b78ed242-32766: fewer nodes than the first of BlockSizes" in done.stderr and "BlockSizes=2\n" in done.stdout
    text = ("- topology: a\n  tree: {switches: [{switch: s, nodes: 'n[1-2]'}]}\n- topology: b\n  cluster_default: true\n  block: "
            "{block_sizes: [2], blocks: [{block: b1, nodes: 'n[1-2]'}]}\n")
    done = hpc_mp("-", "--to", "tree", given=text)
    assert "SwitchName=s Nodes=n[1-2]\n" in done.stdout and "left out: b" in done.stderr


def test_measured_rates_as_a_tree_or_not(slurm: dict[str, str]) -> None:
    assert hpc_mp("--from", "measured", environ=slurm).returncode == 2, "nothing was measured yet"
    note(slurm, measure(leaves(2, 2), 0.3))
    done = hpc_mp("--from", "measured", "--to", "tree", environ=slurm)
    assert done.returncode == 0
    assert done.stdout.endswith("SwitchName=leaf1 Nodes=n[1-2]\nSwitchName=leaf2 Nodes=n[3-4]\n"
                                "SwitchName=root Switches=leaf[1-2]\n")
    assert "GB/s inside 2 groups" in done.stdout
    assert hpc_mp(where("lab", slurm), "--json", environ=slurm).returncode == 0, "the file itself does as well"
    note(slurm, measure(leaves(4)))
    done = hpc_mp("--from", "measured", "--to", "tree", environ=slurm)
    assert (done.returncode, done.stdout) == (1, "") and "do not distinguish leaves" in done.stderr


@pytest.mark.parametrize(("groups", "across", "verdict", "code"), table(__file__, "topology_command.toml", "checks"))
def test_check(slurm: dict[str, str], groups: list[list[str]], across: float, verdict: str, code: int) -> None:
    note(slurm, measure(groups, across))
    done = hpc_mp("--check", environ=slurm)
    assert done.returncode == code and done.stdout.startswith(f"{verdict}: ")
    document = json.loads(hpc_mp("--check", "--json", environ=slurm).stdout)
    assert document["verdict"] == verdict
    assert bool(document["odd"]) == (verdict == "disagrees")
    if code:
        named = {node for odd in document["odd"] for node in odd["nodes"]}
        assert named == {"n3", "n2"} and "n3: Slurm has them under s2, but rates put them with the nodes of s1" in done.stdout


def test_check_of_files(tmp_path: Path) -> None:
    rates = tmp_path / "cluster.json"
    write_measured(rates, measure([["n1", "n2"], ["n3", "n4"]], 0.3))
    assert hpc_mp(TREE, "--check", "--measured", rates).returncode == 0
    rates.write_text('{"pairs": [[0, 9, 1.0]], "nodes": ["a"], "cluster": "x", "time": 0}')
    done = hpc_mp(TREE, "--check", "--measured", rates)
    assert done.returncode == 2 and "is not a cluster.json" in done.stderr


@pytest.mark.parametrize(("words", "said"), table(__file__, "topology_command.toml", "wrong_words", globals()))
def test_wrong_words_are_refused(slurm: dict[str, str], words: tuple[str | Path, ...], said: str) -> None:
    done = hpc_mp(*words, environ=slurm)
    assert (done.returncode, bool(done.stdout)) == (2, "--json" in words) and said in done.stderr


def test_without_slurm_it_says_so(tmp_path: Path) -> None:
    done = hpc_mp(environ={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 2 and "scontrol is not on PATH" in done.stderr
