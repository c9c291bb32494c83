"""docs/user/doctor.md describes every check, in the words of the tables. Run as a program, this file writes its rows anew."""

from __future__ import annotations

import re
from pathlib import Path

from hpc_mp.doctor.checks.registry import PASSIVE
from hpc_mp.doctor.container_diff import ITEMS
from hpc_mp.doctor.drift import TRAITS

ROW = r"^\| `([a-z0-9-]+)` \|.*$"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"


def actual() -> list[str]:
    checks = [(check.code, check.reads, check.rule, check.remedy) for check in PASSIVE]
    items = [(item.code, item.reads, f"{item.grave}: less of it than on the host", item.remedy) for item in ITEMS]
    drifts = [(f"drift-{trait}", what, "warning: nodes differ", cure) for trait, (what, cure) in TRAITS.items()]
    return ["| `{}` | {} | {} | {} |".format(*(text.replace("|", "\\|") for text in row)) for row in [*checks, *items, *drifts]]


def test_every_check_is_described_as_it_is_and_none_is_invented() -> None:
    written = [found[0] for found in re.finditer(ROW, DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)]
    wanted = actual()
    assert [row for row in wanted if row not in written] == [] and [row for row in written if row not in wanted] == []
    assert len(written) == len(set(written)) == len(wanted)


if __name__ == "__main__":
    rows = {row.split("`")[1]: row for row in actual()}
    text = DOCUMENT.read_text(encoding="utf-8")
    print("to be put in its place:", *sorted(set(rows) - set(re.findall(ROW, text, re.MULTILINE))))
    DOCUMENT.write_text(re.sub(ROW, lambda found: rows.get(found[1], ""), text, flags=re.MULTILINE), encoding="utf-8")
