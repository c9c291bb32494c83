"""``hpc-mp cluster nodes``: the ledger as a user sees and changes it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rendering import executable
from tables import table

from hpc_mp.cli.cluster import command
from hpc_mp.cluster.bad_nodes import AVOIDED_S, BadNode, bad_nodes, ledger, record


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ledger of a cluster of four nodes."""
    executable(tmp_path / "bin" / "scontrol", "#!/bin/sh\necho 'ClusterName = here'\n")
    executable(tmp_path / "bin" / "sinfo", "#!/bin/sh\nfor n in 1 2 3 4; do echo \"n$n|idle|none\"; done\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return ledger("here")


def typed(*words: str) -> Result:
    return CliRunner().invoke(command, ["nodes", *words])


def document() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(typed("--json").output)["nodes"]
    return found


def test_an_empty_ledger_says_so(path: Path) -> None:
    assert typed().output == "cluster here: no bad or suspected nodes\n"
    assert not path.exists()


def test_the_ledger_is_listed_with_who_since_when_and_why(path: Path) -> None:
    record(path, [BadNode("n3", "lost", "n3 gave no sign of life", "/runs/a/0001", 0.0, 4e9)])
    shown = typed().output
    for word in ("n3", "likely", "lost", "/runs/a/0001", "gave no", "new jobs exclude n3"):
        assert word in shown, shown
    assert [(line["node"], line["certainty"], line["avoided"]) for line in document()] == [("n3", "likely", True)]


def test_nodes_are_put_in_and_taken_back(path: Path) -> None:
    assert typed("--add", "n[2-3]", "--because", "a broken fan").exit_code == 0
    assert typed("--add", "n4", "--because", "slow, some say", "--suspected").exit_code == 0
    assert {*bad_nodes(path)} == {"n2", "n3"}
    assert [(line["node"], line["evidence"], line["avoided"]) for line in document()] == [
        ("n2", "a broken fan", True), ("n3", "a broken fan", True), ("n4", "slow, some say", False)]
    found = bad_nodes(path)["n2"]
    assert found.until - found.time == AVOIDED_S
    assert "by hand: a broken fan\n" in typed().output
    words = typed("--take-back", "n[1-2],n4").output
    assert "removed: n[2,4]" in words and "not in the ledger: n1\n" in words
    assert [line["node"] for line in document()] == ["n3"]


@pytest.mark.parametrize(("words", "value", "remedy"), table(__file__, "cluster_nodes.toml", "mistakes"))
def test_a_mistake_changes_nothing(path: Path, words: tuple[str, ...], value: str, remedy: str) -> None:
    record(path, [BadNode("n3", "lost", "gone", "run", 0.0, 4e9)])
    before, done = path.read_text(), typed(*words)
    said = str(done.exception)
    assert done.exit_code and value in said and remedy in said, said
    assert path.read_text() == before
