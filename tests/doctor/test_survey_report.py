"""What follows from a survey, and its pictures."""

import json
import shlex
from pathlib import Path

import pytest
from html_page import Page
from rich.console import Console
from survey_paper import RATE, Faults, made

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bad_nodes import BadNode, bad_nodes, findings, ledger, record
from hpc_mp.cluster.bandwidth import read_measured, where
from hpc_mp.doctor.survey.diagnosis import Diagnosis
from hpc_mp.doctor.survey.evidence import Absence
from hpc_mp.doctor.survey.figures import STOPS, bars, matrix, pictures, shade, switches
from hpc_mp.doctor.survey.page import render, write_page
from hpc_mp.doctor.survey.report import drain_commands, remember, to_avoid


def diagnosis(code: str, *members: str, certain: bool = True) -> Diagnosis:
    return Diagnosis(code, members, certain, f"{members[0]}'s evidence; $(rm) `x` \"y\"")


def test_launch_learns_of_a_bad_node_and_of_the_rates(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    report = made(Faults(node_rate={2: 0.5}))
    assert [finding.node for finding in remember(report, environ)] == ["n2"]
    found = bad_nodes(ledger("lab", environ), now=report.time + 3600)
    assert found["n2"].code == "node-slow" and found["n2"].evidence
    assert not bad_nodes(ledger("lab", environ), now=report.time + 1e6)
    rates = read_measured(where("lab", environ))
    assert rates is not None and rates.nodes == report.evidence.nodes and len(rates.pairs) == 15
    assert rates.between("n0", "n1") == pytest.approx(RATE, rel=0.1) == rates.usual
    assert rates.between("n2", "n5") == pytest.approx(RATE / 2, rel=0.1) and rates.between("n0", "x") is None


def test_a_healthy_survey_leaves_rates_alone_and_a_partial_one_no_rates(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert remember(made(Faults()), environ) == () and not ledger("lab", environ).exists() and where("lab", environ).exists()
    where("lab", environ).unlink()
    assert remember(made(Faults(mtu={1: 1400}), steps=4), environ)[0].node == "n1" and not where("lab", environ).exists()
    assert remember(made(Faults(mtu={1: 1400}), cluster=None), environ) == ()


def held(node: str, code: str, evidence: str = "") -> BadNode:
    return BadNode(node, code, evidence, "run", 0.0, 1e12)


def test_a_clean_survey_clears_what_it_disproves(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    path = ledger("lab", environ)
    stays = [held("n1", "hardware"), held("n2", "by hand"), held("n3", "node-corrupt"), held("elsewhere", "node-slow"),
             held("n4", "link-slow", "n4–elsewhere: 20 %")]
    gone = [held("n1", "lost"), held("n2", "node"), held("n3", "node-slow"), held("n4", "link-cut", "n1–n4: silent")]
    record(path, [*stays, *gone])
    remember(made(Faults(), steps=2), environ)
    assert len(findings(path)) == 9, "an interrupted survey disproves nothing"
    assert remember(made(Faults()), environ) == ()
    assert {(found.node, found.code) for found in findings(path)} == {(found.node, found.code) for found in stays}


def test_a_survey_clears_nobody_whom_it_suspects(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    record(ledger("lab", environ), [held("n2", "lost"), held("n3", "lost")])
    remember(made(Faults(node_rate={2: 0.5})), environ)
    assert [(found.node, found.code) for found in findings(ledger("lab", environ), now=1.7e9 + 60)] == [
        ("n2", "lost"), ("n2", "node-slow")]


def test_of_a_bad_link_one_end_is_avoided() -> None:
    assert [*to_avoid([diagnosis("link-cut", "n1–n3")])] == ["n3"]
    assert [*to_avoid([diagnosis("link-slow", link) for link in ("n1–n3", "n1–n4", "n2–n5")])] == ["n1", "n5"]
    assert [*to_avoid([diagnosis("link-slow", "n1–n3"), diagnosis("node-cpu", "n1")])] == ["n1"]
    assert [*to_avoid([diagnosis("rail-slow", "n4 rail 2")])] == ["n4"]
    assert to_avoid([diagnosis("node-slow", "n1", "n2", certain=False), diagnosis("uplink-slow", "s1")]) == {}


def test_drain_reasons_have_a_form_and_pass_a_shell() -> None:
    (command,) = drain_commands([diagnosis("node-loss", "n3")])
    words = shlex.split(command)
    assert words[:4] == ["scontrol", "update", "NodeName=n3", "State=DRAIN"]
    assert words[4].startswith("Reason=hpc-mp:node-loss:n3s evidence")
    assert len(words) == 5 and not {*command} & {*"$`\"\\;"}


def test_the_document_is_json_and_whole() -> None:
    document = json.loads(json.dumps(made(Faults(node_loss={3: 0.02}, cut=frozenset({(0, 5)}))).document()))
    assert {found["code"]: found["members"] for found in document["diagnoses"]} == {"node-loss": ["n3"], "link-cut": ["n0–n5"]}
    assert all(found["remedy"] for found in document["diagnoses"]) and len(document["pairs"]) == 30 and document["complete"]
    assert [rate for a, b, _, rate in document["pairs"] if {a, b} == {"n0", "n5"}] == [None, None]


def test_the_matrix_and_the_bars_show_the_fault() -> None:
    report = made(Faults(node_rate={2: 0.5}, cut=frozenset({(0, 5)})))
    heat = matrix(report)
    assert heat is not None and "n2" in heat.marked and len(heat.cells) == 30
    cells = {(cell.row, cell.column): cell for cell in heat.cells}
    assert 45 <= int(cells[2, 4].text) <= 55 and 90 <= int(cells[1, 4].text) <= 110 and cells[0, 5].text == "×"
    assert cells[0, 5].tip == "n0 → n5: no transfer succeeded" and cells[2, 4].shade != cells[1, 4].shade
    assert [bar.fault for bar in bars(report)] == ["", "", "node-slow", "", "", ""]
    assert 0.45 < bars(report)[2].share < 0.55 and bars(report)[1].share > 0.9
    tree = switches(report)
    assert [(leaf.name, leaf.nodes) for leaf in tree.leaves if leaf.name == "s2"] == [("s2", (("n2", "node-slow"), ("n3", "")))]
    assert tree.links == (("n0–n5", "link-cut"),)


def test_shades_go_from_red_to_blue_and_can_be_read() -> None:
    for share, rgb in STOPS:
        assert shade(share).fill == f"#{bytes(rgb).hex()}"
    assert shade(-1) == shade(0) and shade(9) == shade(STOPS[-1][0]) and shade(None) != shade(0)
    assert {shade(share / 50).ink for share in range(60)} == {"#ffffff", "#111111"}


@pytest.mark.parametrize("steps", [None, 1, 5])
def test_the_terminal_shows_it_at_any_time(steps: int | None) -> None:
    console = Console(width=100, record=True, force_terminal=False)
    for picture in pictures(made(Faults(mtu={4: 1400}, node_rate={2: 0.5}), steps=steps)):
        console.print(picture)
    text = console.export_text()
    assert "✗ n4  node-mtu" in text if steps != 1 else "n4" in text
    assert steps is not None or ("✗ n2  node-slow" in text and "│" in text and " 50 " in text)


@pytest.mark.parametrize("steps", [None, 1, 5])
def test_the_page_is_whole_and_escapes_what_nodes_say(steps: int | None, tmp_path: Path) -> None:
    report = made(Faults(node_rate={2: 0.5}, cut=frozenset({(0, 5)})), cluster="<lab>", steps=steps)
    report.evidence.absent = {"<b>x</b>": Absence("node-down", "Slurm calls it <i>down</i>")}
    path = tmp_path / "doctor.html"
    write_page(path, report)
    page = Page(path.read_text(encoding="utf-8"))
    words = page.text
    assert not any({"src", "href", "onload"} & attributes.keys() for _, attributes in page.found), "nothing is fetched"
    assert "<lab>" in words and "<b>x</b> was not measured: Slurm calls it <i>down</i>" in words
    assert steps is not None or all(part in words for part in ("node-slow", "link-cut", "scontrol update NodeName=n2"))
    assert ("interrupted" in words) == (steps is not None)


def test_a_page_that_cannot_be_written() -> None:
    with pytest.raises(HpcMpError, match="--html"):
        write_page(Path("/proc/nowhere/x.html"), made(Faults(), count=2))
    assert "Nothing is wrong" in render(made(Faults()))
