"""The clean template and project of the CycleCloud tests, and what is planted into them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from hpc_mp.clouds.azure import Finding, lint, read_given, read_project

GOLDEN = Path(__file__).parents[1] / "golden" / "cyclecloud"
CLEAN = (GOLDEN / "clean.txt").read_text(encoding="utf-8")
CASES: list[dict[str, Any]] = tomllib.loads((GOLDEN / "planted.toml").read_text(encoding="utf-8"))["case"]
PROJECT = {
    "project.ini": "[project]\nname = training\nlabel = Training\nversion = 1.2.0\ntype = application\n\n"
                   "[blobs]\nFiles = wheel.tgz\n\n[spec execute]\n",
    "blobs/wheel.tgz": "not really",
    "specs/execute/cluster-init/scripts/README.txt": "Scripts run in the order of their names.\n",
    "specs/execute/cluster-init/scripts/10-limits.sh":
        "#!/bin/bash\nset -e\ncp \"$CYCLECLOUD_SPEC_PATH/files/limits.conf\" /etc/\n",
    "specs/execute/cluster-init/scripts/20-venv.sh": "#!/bin/bash\ntest -d /shared/venv\n",
    "specs/execute/cluster-init/files/limits.conf": "* hard memlock unlimited\n",
    "specs/execute/cluster-init/tests/README.txt": "None yet.\n",
}


def write_project(root: Path, changes: dict[str, str], modes: dict[str, int]) -> Path:
    """The clean project with some files changed ("" leaves one out), in a directory whose name holds a blank."""
    folder = root / "a project"
    for name, text in (PROJECT | changes).items():
        if text:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            path.chmod(modes.get(name, 0o755))
    return folder


def planted(case: dict[str, Any]) -> str:
    """The template of a case."""
    assert CLEAN.count(case.get("find", "[cluster Training]")) == 1, case
    return CLEAN.replace(case["find"], case["put"]) if "find" in case else CLEAN


def expected(case: dict[str, Any], text: str) -> int:
    """The line on which the finding is expected."""
    if "line" in case:
        return int(case["line"])
    if "at" in case:
        assert text.count(case["at"]) == 1, case
        return text[:text.index(case["at"])].count("\n") + 1
    return CLEAN[:CLEAN.index(case["find"])].count("\n") + 1 + int(case.get("down", 0))


def found(case: dict[str, Any], text: str, root: Path) -> tuple[Finding, ...]:
    """What the linter says of a template with the case's parameters and project."""
    given = project = None
    if "params" in case:
        file = root / "params.json"
        values = {name: None if value == "NULL" else value for name, value in case["params"].items()}  # TOML has no null
        file.write_text(json.dumps(values, indent=2), encoding="utf-8")
        given = read_given(file)
    if "project" in case:
        project = read_project(write_project(root, case["project"], case.get("modes", {})))
    return lint(text, file="t.txt", given=given, project=project)
