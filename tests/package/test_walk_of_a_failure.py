"""The walk of a failure from a rank to `hpc-mp status`: few files, few types, one judge, as CONTRIBUTING.md has it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MOST_FILES, MOST_TYPES = 14, 6
JUDGE = "hpc_mp/diagnosis/classify.py"
Walk = list[tuple[str, list[str]]]  # (file, its types)


def walks(text: str) -> list[Walk]:
    """Return the tables under the heading "The walk of a failure"."""
    section = re.search(r"^## The walk of a failure\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", section[1], re.MULTILINE) if section else []
    rows = [[line.split("|")[1:] for line in table.splitlines()[2:]] for table in tables]
    return [[(cells[0].strip(" `"), re.findall(r"`(\w+)`", cells[2])) for cells in table] for table in rows]


def faults(walk: Walk) -> list[str]:
    """Return what is wrong with a walk: a missing file, a type that its file does not define, too many of them, no judge."""
    lacking = [name for file, names in walk for name in (names if (ROOT / file).is_file() else [file])
               if not (ROOT / file).is_file() or name not in classes(ROOT / file)]
    files, types = {file for file, _ in walk}, {name for _, names in walk for name in names}
    return [*lacking, *(["files"] if len(files) > MOST_FILES else []), *(["types"] if len(types) > MOST_TYPES else []),
            *(["judge"] if JUDGE not in files else [])]


def classes(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)}


def test_the_walks_lead_through_files_and_types_that_exist() -> None:
    exception, kill = walks(CONTRIBUTING)
    assert faults(exception) == faults(kill) == []
    assert exception[0][0].startswith("hpc_mp/train/") and exception[-1][0] == kill[-1][0] == "hpc_mp/cli/status.py"


@pytest.mark.parametrize(("walk", "wrong"), [
    ([(JUDGE, []), ("hpc_mp/rundir/lost.py", ["Cause"])], ["hpc_mp/rundir/lost.py"]),
    ([(JUDGE, []), ("hpc_mp/rundir/outcome.py", ["Verdict"])], ["Verdict"]),
    ([("hpc_mp/rundir/outcome.py", ["Cause"])], ["judge"]),
    ([(JUDGE, []), *((str(file.relative_to(ROOT)), []) for file in (ROOT / "hpc_mp" / "base").glob("*.py"))], ["files"]),
])
def test_a_walk_that_leads_nowhere_would_be_seen(walk: Walk, wrong: list[str]) -> None:
    assert faults(walk) == wrong


def test_one_judge() -> None:
    """`Cause` of ranks' evidence is made in one place: other causes are ends that no rank has a part in."""
    files = [*(ROOT / "hpc_mp").rglob("*.py")]
    texts = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    assert [file for file, text in texts.items() if re.search(r"^def classify\(", text, re.MULTILINE)] == [JUDGE]
    assert {file for file, text in texts.items() if re.search(r"\bimport .*\bclassify\b", text)} == {
        "hpc_mp/supervisor/ending.py", "hpc_mp/launch/backends/watch.py"}
