"""Alarms that public job scripts set off without a fault, and the true alarms beside them that still come."""

from pathlib import Path

import pytest
from lint_cases import placed
from tables import table

from hpc_mp.lint.kinds import kind_of
from hpc_mp.lint.sbatch import lint

RELEASES: dict[str, tuple[int, int]] = {"22.05": (22, 5), "24.11": (24, 11), "25.05": (25, 5)}


def codes(text: str, where: Path, release: str | None = None) -> set[str]:
    return {finding.code for finding in lint(placed(text)[0], directory=where, version=RELEASES.get(release or ""))}


@pytest.mark.parametrize(("code", "text"), table(__file__, "false_alarms.toml", "false_alarms"))
def test_no_false_alarm_comes(code: str, text: str, tmp_path: Path) -> None:
    assert code not in codes(text, tmp_path)


@pytest.mark.parametrize(("code", "text"), table(__file__, "false_alarms.toml", "true_alarms"))
def test_the_true_alarm_still_comes(code: str, text: str, tmp_path: Path) -> None:
    assert code in codes(text, tmp_path)


@pytest.mark.parametrize(("release", "finds"), [("22.05", False), ("24.11", False), ("25.05", True), (None, True)])
def test_several_mail_types_are_merged_before_25_05(release: str | None, finds: bool, tmp_path: Path) -> None:
    """sbatch 22.05.8 -vvv: "mail-type : BEGIN,END"."""
    for more in ("#SBATCH --mail-type=end\n", "#SBATCH -J x --mail-type end\n"):
        assert ("HM110" in codes("#SBATCH --mail-type=begin\n" + more, tmp_path, release)) is finds
    assert "HM110" in codes("#SBATCH --qos=a\n#SBATCH --qos=b\n", tmp_path, release)


SCRIPT = "#!/bin/bash\n#SBATCH -N 2\n"


@pytest.mark.parametrize(("line", "kind"), table(__file__, "false_alarms.toml", "braces"))
def test_braces_between_quotes_are_no_placeholder_of_a_script(line: str, kind: str) -> None:
    text = line if line.startswith(("#!", "[")) else SCRIPT + line
    assert kind_of(Path("a.toml" if text.startswith("[") else "a.sh"), text) == kind
