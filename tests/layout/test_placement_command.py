"""`hpc-mp placement`: its picture, its tables and what it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from placements import COSTS, FABRIC, rows
from rich.console import Console
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.cli.placement import picture
from hpc_mp.cluster.topology import read_topology
from hpc_mp.layout.placement import Degrees, Placement, from_dict, place

GOLDEN = Path(__file__).parents[1] / "golden"


def rendered(placement: Placement, width: int = 80, **where: Any) -> str:
    console = Console(width=width, no_color=True, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture(placement, **where))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def test_pictures_with_and_without_switches() -> None:
    plain, tree = place(Degrees(tensor=2, pipeline=2, data=3), "cluster", 4), read_topology(FABRIC)
    switched = rendered(place(Degrees(tensor=2, pipeline=2, data=2), "cluster", 2), hosts=("n1", "n3", "n2", "n5"), tree=tree)
    assert rendered(plain) == (GOLDEN / "placement.txt").read_text(encoding="utf-8")
    assert switched == (GOLDEN / "placement_switches.txt").read_text(encoding="utf-8")


def test_picture_colours_stages_and_tensor_groups() -> None:
    console = Console(width=80, force_terminal=True, color_system="standard", _environ={})
    with console.capture() as capture:
        console.print(picture(place(Degrees(tensor=2, pipeline=2, data=2), "DPT")))
    cells = re.findall(r"\x1b\[([\d;]+)m *(\d) d", capture.get())
    assert {int(rank): style for style, rank in cells} == {  # cyan, bold yellow: every second tensor group is bold
        0: "36", 1: "36", 2: "1;33", 3: "1;33", 4: "36", 5: "36", 6: "1;33", 7: "1;33"}


def test_picture_is_bounded_and_fits_80_columns() -> None:
    text = rendered(place(Degrees(8, 8, 8), "DPT", 8))
    assert "… and 48 more nodes" in text
    assert "node 15" in text and "node 16" not in text
    assert max(map(len, text.splitlines())) <= 80


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["placement", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_command_prints_tables_and_marks_the_order() -> None:
    text = run("--tp", "2", "--pp", "4", "--dp", "8", "--order", "spread")
    assert "64 ranks on 8 nodes, order TPD" in text
    assert [line[1] for line in [line.split() for line in text.splitlines() if line.startswith("→")]] == ["TPD"]
    table = {line.replace("→", " ").split()[0]: line for line in text.splitlines() if "(" in line and "/" in line}
    for order, _, cell, _ in rows(COSTS):
        assert " ".join(f"({pair.replace(',', ', ')})" for pair in cell.split()) in " ".join(table[order].split())


def test_command_prints_one_json_document() -> None:
    tree = json.loads(run("--tp", "2", "--pp", "2", "--dp", "2", "--cp", "2", "--ep", "4", "--ranks-per-node", "4", "--json"))
    assert tree["order"] == "DPCT"
    assert tree["nodes"] == 4
    assert set(tree["ranks"][0]) == {"rank", "node", "local_rank", "dp", "pp", "cp", "tp"}
    assert set(tree["groups"]) == {"tp", "pp", "dp", "mp", "tp_dp", "cp", "ep", "edp"}
    assert tree["cost"] == tree["orders"]["DPCT"]
    assert from_dict(tree) == place(Degrees(2, 2, 2, 2, 4), "cluster", 4, "auto")


@pytest.mark.parametrize(("rank_map", "nodes"), [
    ("auto", [0, 0, 1, 1]), ("block", [0, 0, 1, 1]), ("cyclic", [0, 1, 0, 1]), ("1,0,0,1", [1, 0, 0, 1])])
def test_command_takes_a_rank_map(rank_map: str, nodes: list[int]) -> None:
    arguments = ["--tp", "2", "--dp", "2", "--ranks-per-node", "2", "--rank-map", rank_map]
    tree = json.loads(run(*arguments, "--json"))
    assert [at["node"] for at in tree["ranks"]] == nodes
    assert from_dict(tree) == place(Degrees(tensor=2, data=2), "DPT", 2, tuple(nodes) if "," in rank_map else rank_map)
    table = run(*arguments).partition("Ranks\n")[2].splitlines()[1:5]
    assert [int(line.split()[1]) for line in table] == nodes


FOUR_NODES = ("--tp", "2", "--pp", "2", "--dp", "2", "--ranks-per-node", "2", "--topology")


def test_command_shows_hosts_and_leaves(tmp_path: Path) -> None:
    (file := tmp_path / "topology.conf").write_text(FABRIC)
    text = run(*FOUR_NODES, str(file), "--nodes", "n[1-4]")
    assert [line for line in text.splitlines() if line.startswith("s")] == ["s1:", "s2:"]  # auto: neighbours together
    table = [line.split()[:4] for line in text.partition("Ranks\n")[2].splitlines()[:9]]
    assert table[0] == ["rank", "host", "leaf", "local"]
    assert table[1:6] == [["0", "n1", "s1", "0"], ["1", "n1", "s1", "1"], ["2", "n3", "s1", "0"], ["3", "n3", "s1", "1"],
                          ["4", "n2", "s2", "0"]]
    assert re.search(r"→  DPT .* 0/2/2 +0/0/4\b", text)
    assert re.search(r"→  DPT .* 0/2/2 +0/4/0\b", run(*FOUR_NODES, str(file), "--nodes", "n[1-4]", "--rank-map", "block"))
    tree = json.loads(run(*FOUR_NODES, str(file), "--json"))
    assert tree["hosts"] == ["n1", "n3", "n2", "n4"]
    assert (tree["ranks"][2]["host"], tree["ranks"][2]["leaf"]) == ("n3", "s1")
    assert tree["uplinks"]["DPT"] == {"s1": {"tp": 0, "pp": 0, "dp": 4}, "s2": {"tp": 0, "pp": 0, "dp": 4}}


@pytest.mark.parametrize(("arguments", "words"), table(__file__, "placement_command.toml", "hosts"))
def test_command_wants_as_many_hosts_as_nodes(tmp_path: Path, arguments: str, words: str) -> None:
    (file := tmp_path / "topology.conf").write_text(FABRIC)
    result = CliRunner().invoke(cli, ["placement", *FOUR_NODES, str(file), *arguments.split()])
    assert isinstance(result.exception, HpcMpError)
    assert words in str(result.exception)


@pytest.mark.parametrize(("rank_map", "words"), table(__file__, "placement_command.toml", "wrong_maps"))
def test_wrong_maps_are_refused(rank_map: str | list[int], words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        place(Degrees(tensor=4), "DPT", 2, rank_map if isinstance(rank_map, str) else tuple(rank_map))


@pytest.mark.parametrize("arguments", table(__file__, "placement_command.toml", "wrong_input"))
def test_command_refuses_wrong_input(arguments: str) -> None:
    assert isinstance(CliRunner().invoke(cli, ["placement", *arguments.split()]).exception, HpcMpError)


def test_command_exits_2_without_traceback_and_imports_no_torch() -> None:
    code = ("import sys\nfrom hpc_mp.cli.main import main\n"
            "try: main()\n"
            "finally: print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n")

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "placement", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    good = start("--tp", "2", "--dp", "2")
    assert (good.returncode, good.stdout.splitlines()[-1]) == (0, "[]")
    bad = start("--order", "dpt")
    assert (bad.returncode, bad.stdout.splitlines()[-1]) == (2, "[]")
    assert bad.stderr == ("hpc-mp: order = 'dpt': must be cluster, spread, or a permutation of the letters DPT or "
                          "DPCT. Write DPT.\n")
