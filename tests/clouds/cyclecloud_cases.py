"""The clean template and project of the CycleCloud tests, and the faults that are planted into them."""

import json
import tomllib
from pathlib import Path
from typing import Any

from tables import table

from cyclecloud_lint.rules import lint
from cyclecloud_lint.template import read_parameters, read_project
from hpc_mp.base.findings import Finding

GOLDEN = Path(__file__).parents[1] / "golden" / "cyclecloud"
CLEAN = (GOLDEN / "clean.txt").read_text(encoding="utf-8")
CASES: list[dict[str, Any]] = tomllib.loads((GOLDEN / "planted.toml").read_text(encoding="utf-8"))["case"]
PROJECT = table(__file__, "cyclecloud_cases.toml", "project")


def write_project(root: Path, changes: dict[str, str]) -> Path:
    """Write the clean project with some files changed, into a directory with a blank in its name."""
    folder = root / "a project"
    for name, text in (PROJECT | changes).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def planted(case: dict[str, Any]) -> str:
    """Return the template of a case."""
    assert CLEAN.count(case.get("find", "[cluster Training]")) == 1, case
    return CLEAN.replace(case["find"], case["put"]) if "find" in case else CLEAN


def expected(case: dict[str, Any], text: str) -> int:
    """Return the line on which the finding is expected."""
    if "line" in case:
        return int(case["line"])
    if "at" in case:
        assert text.count(case["at"]) == 1, case
        return text[:text.index(case["at"])].count("\n") + 1
    return CLEAN[:CLEAN.index(case["find"])].count("\n") + 1 + int(case.get("down", 0))


def findings_of(case: dict[str, Any], text: str, root: Path) -> tuple[Finding, ...]:
    parameters = project = None
    if "params" in case:
        file = root / "params.json"
        file.write_text(json.dumps(case["params"], indent=2), encoding="utf-8")
        parameters = read_parameters(file)
    if "project" in case:
        project = read_project(write_project(root, case["project"]))
    return lint(text, file="t.txt", parameters=parameters, project=project)
