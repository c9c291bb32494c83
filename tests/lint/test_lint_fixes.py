"""The linter's advice, applied to the planted faults by a machine that reads nothing but the advice: the finding is gone."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from lint_cases import CASES, HEAD
from tables import table

from hpc_mp.lint.sbatch import Finding, lint

FILLED = {"HH:MM:SS": "01:00:00", "=N": "=8", "=FILE": "=hosts", "…/etc": "/usr/share/conda/etc"}

Edit = Callable[[list[str], int, re.Match[str]], None]  # changes the lines, of which the one at an index has the fault


def above(lines: list[str], at: int, advice: re.Match[str]) -> None:
    lines.insert(at, advice[1])


def below(lines: list[str], at: int, advice: re.Match[str]) -> None:
    lines.insert(at + 1, advice[1])


def around(lines: list[str], at: int, advice: re.Match[str]) -> None:
    lines[at:at + 1] = [advice[1], lines[at], advice[2]]


def directive(lines: list[str], at: int, advice: re.Match[str]) -> None:
    lines.insert(1, advice[1])


def dropped(lines: list[str], at: int, advice: re.Match[str]) -> None:
    del lines[at]


def moved(lines: list[str], at: int, advice: re.Match[str]) -> None:
    lines.insert(1, lines.pop(at))


def joined(lines: list[str], at: int, advice: re.Match[str]) -> None:
    lines[:] = re.sub(r"(a\.py);?\s+(?=python|torchrun)", r"\1 && ", "\n".join(lines)).split("\n")


def changed(pattern: str, to: str) -> Edit:
    """In the line of the fault: what matches becomes ``to``, in which ``{}`` is what the advice says."""
    def edit(lines: list[str], at: int, advice: re.Match[str]) -> None:
        said = advice[1] if advice.groups() else ""
        lines[at] = re.sub(pattern, lambda found: found.expand(to).replace("{}", said), lines[at], count=1)

    return edit


def rewritten(swaps: Mapping[str, str]) -> Edit:
    def edit(lines: list[str], at: int, advice: re.Match[str]) -> None:
        for old, new in swaps.items():
            lines[:] = [line.replace(old, new.replace("{}", advice[1] if advice.groups() else "")) for line in lines]

    return edit


value = changed(r"=(\$\(\(.*\)\)|\$\(.*\)|\S+)", "={}")
NAMED = {"above": above, "below": below, "around": around, "directive": directive, "dropped": dropped, "moved": moved,
         "joined": joined, "value": value}
EDITS: dict[str, Edit] = {
    pattern: NAMED[row] if isinstance(row, str) else rewritten(row) if isinstance(row, dict) else changed(*row)
    for pattern, row in table(__file__, "lint_fixes.toml", "edits").items()}


def followed(text: str, finding: Finding) -> str | None:
    """The text with the advice applied, or None when it needs a person."""
    fix = finding.fix
    for short, long in FILLED.items():
        fix = fix.replace(short, long)
    lines, at = text.split("\n"), finding.line - 1
    for pattern, edit in EDITS.items():
        if advice := re.search(pattern, fix):
            if edit is dropped and at and not lines[at].startswith(("#SBATCH", "export ", "ulimit ")):
                continue  # that line does more than what is to be left out
            edit(lines, at, advice)
            return "\n".join(lines)
    return None


def applied(case: dict[str, Any], directory: Path) -> bool | None:
    """Whether following the advice removes the finding; None when no machine can follow it."""
    bad = case["bad"].lstrip("\n") if case["bad"].startswith("\n\n") else case["bad"]
    text = bad if "#!" in bad[:4] or "\r" in bad else HEAD + bad
    version = tuple(map(int, case["version"].split("."))) if "version" in case else None
    [finding, *_] = [each for each in lint(text, directory=directory, version=version)  # type: ignore[arg-type]
                     if each.code == case["code"]]
    mended = followed(text, finding)
    if mended is None:
        return None
    if found := re.search(r"mkdir -p ([^\s.]+)", finding.fix):
        (directory / found[1]).mkdir(parents=True)
    after = lint(mended, directory=directory, version=version)  # type: ignore[arg-type]
    return not any(each.code == case["code"] for each in after)


NEEDS_A_PERSON = {"HM108", "HM116", "HM119", "HM120", "HM215", "HM312", "HM331", "HM353", "HM355", "HM360", "HM402",
                  "HM405", "HM411", "HM412", "HM415", "HM611"}


@pytest.mark.parametrize("case", CASES, ids=[f"{case['code']}-{at}" for at, case in enumerate(CASES)])
def test_the_advice_removes_the_finding(case: dict[str, Any], tmp_path: Path) -> None:
    removed = applied(case, tmp_path)
    assert removed is not False
    assert removed or case["code"] in NEEDS_A_PERSON, (
        f"{case['code']}: no row of lint_fixes.toml follows its remedy: "
        "add one, or it to NEEDS_A_PERSON and its twin to planted.toml")
