"""One finding for all that find something: its JSON, its scale, what a monitor reads."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest

from hpc_mp.base.findings import NAGIOS, SEVERITIES, Finding, Hit, Rule, findings_document, nagios_line, summary, worst

BAD = Finding("gpu-ecc", "error", "GPU 3", "2 errors | row 7", "replace it")
LINE = Finding("HM101", "warning", "", "no time limit", "add one", "job.sbatch", 3)
UNSEEN = Finding("dns", "unknown", "", "no answer")
FINE = Finding("shm", "ok", "/dev/shm", "1 GiB")


def test_a_document_holds_every_field_and_null_where_it_does_not_apply() -> None:
    assert UNSEEN.document() == {"code": "dns", "severity": "unknown", "subject": None, "message": "no answer", "fix": None,
                                 "file": None, "line": None}
    assert {field.name for field in fields(Finding)} == set(LINE.document())


@pytest.mark.parametrize("finding", [BAD, LINE, UNSEEN, FINE], ids=lambda finding: finding.code)
def test_a_finding_comes_back_from_json(finding: Finding) -> None:
    assert Finding.read(json.loads(json.dumps(finding.document()))) == finding


@pytest.mark.parametrize(("findings", "severity", "nagios"), [
    ((), "ok", 0), ((FINE,), "ok", 0), ((FINE, Finding("x", "info", "", "")), "info", 0), ((FINE, UNSEEN), "unknown", 3),
    ((UNSEEN, LINE), "warning", 1), ((LINE, BAD, UNSEEN), "error", 2)])
def test_the_gravest_counts_and_has_the_exit_code_of_a_plug_in(findings: tuple[Finding, ...], severity: str, nagios: int) -> None:
    document = findings_document(findings)
    assert (worst(findings), document["worst"], document["nagios"]) == (severity, severity, nagios)
    assert set(NAGIOS) == set(SEVERITIES)


def test_a_monitor_reads_one_line_with_figures_behind_the_only_bar() -> None:
    line = nagios_line([LINE, BAD, FINE, UNSEEN])
    assert line == ("HPC-MP CRITICAL - 1 error, 1 warning, 1 unknown, 1 ok; gpu-ecc GPU 3: 2 errors / row 7 "
                    "| error=1 warning=1 unknown=1 info=0 ok=1")
    assert "\n" not in nagios_line([Finding("x", "error", "", "a\nb")]) and nagios_line([FINE]).startswith("HPC-MP OK - 1 ok |")


def test_counts_in_words() -> None:
    assert summary([LINE, LINE, BAD]) == "1 error, 2 warnings" and summary([]) == ""


def test_a_rule_fills_its_texts_and_what_was_quoted_is_not_filled_again() -> None:
    rule: Rule[str] = Rule("X1", "warning", lambda case: [Hit(2, case, "use {it}")], "{it} stands there.", "{advice} instead.")
    (finding,) = rule.apply("{advice}", "a.txt")
    assert finding == Finding("X1", "warning", "", "{advice} stands there.", "Use {it} instead.", "a.txt", 2)


def test_it_needs_the_standard_library_alone() -> None:
    """The health check packs it; -S leaves out whatever is installed."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import hpc_mp.base.findings; print(*sorted(sys.modules))"
    root = __file__.rpartition("/tests/")[0]
    done = subprocess.run([sys.executable, "-IS", "-c", code, root], capture_output=True, text=True, check=True)
    assert not {"click", "rich", "pydantic", "numpy"} & set(done.stdout.split())
