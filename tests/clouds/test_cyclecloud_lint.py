"""The linter of cluster templates: a planted fault for every rule on its line, a clean template, the command."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cyclecloud_cases import CASES, CLEAN, GOLDEN, PROJECT, expected, findings_of, planted, write_project

from cyclecloud_lint.rules import RULES, lint
from cyclecloud_lint.template import read_parameters, read_project
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.cloud import command

JUDGED = tomllib.loads(Path(__file__).with_name("judged.toml").read_text(encoding="utf-8"))["row"]
SCRIPT = "specs/execute/cluster-init/scripts/10-limits.sh"


@pytest.mark.parametrize("case", CASES, ids=[f"{case['code']}-{at}" for at, case in enumerate(CASES)])
def test_a_planted_fault_is_found_on_its_line(case: dict[str, Any], tmp_path: Path) -> None:
    text = planted(case)
    findings = findings_of(case, text, tmp_path)
    own = [finding for finding in findings if finding.code == case["code"]]
    assert len(own) == case.get("lines", 1), findings
    assert expected(case, text) in [finding.line for finding in own], own
    file = case.get("file", "")
    where = tmp_path / "params.json" if file == "params" else tmp_path / "a project" / file
    assert {finding.file for finding in own} == {str(where) if file else "t.txt"}
    others = {finding.code for finding in findings if finding.severity != "info"} - {case["code"]}
    assert others <= set(case.get("also", ())), findings
    for finding in findings:
        assert not re.search(r"\{(it|advice)\}", finding.message + finding.fix) and finding.message[-1] in ".?"
        assert finding.fix[-1] in ".?" and finding.fix == finding.fix.strip()


def test_every_rule_has_a_planted_fault_and_a_code_of_its_own() -> None:
    codes = [rule.code for rule in RULES]
    assert len(codes) == len(set(codes)) and {case["code"] for case in CASES} == set(codes)


def test_the_clean_template_and_its_project_have_no_finding(tmp_path: Path) -> None:
    assert lint(CLEAN) == ()
    assert findings_of({"params": {"Region": "westeurope", "MaxGpuNodes": None}, "project": {}}, CLEAN, tmp_path) == ()


@pytest.mark.parametrize("row", JUDGED, ids=lambda row: row["name"])
def test_a_changed_template_has_these_findings(row: dict[str, Any], tmp_path: Path) -> None:
    text = row.get("text", CLEAN)
    for old, written in row.get("replace", ()):
        assert old in text
        text = text.replace(old, written)
    case = {"params": json.loads(row["params"])} if "params" in row else {}
    assert [finding.code for finding in findings_of(case, text, tmp_path)] == row["codes"]


def test_case_and_line_ends_do_not_count() -> None:
    assert lint(CLEAN.replace("\n", "\r\n")) == lint("\ufeff" + CLEAN) == ()
    loud = CLEAN.replace("[[nodearray gpu]]", "[[NodeArray gpu]]").replace("MaxCount = 10", "MAXCOUNT = 10")
    assert lint(loud.replace("Extends = base", "EXTENDS = BASE").replace("    ", "\t")) == ()
    broken = CLEAN.replace("MaxCount = 10", "MaxCount = 10\nnonsense")
    for end in ("\n", "\r\n", "\r"):
        assert [(finding.code, finding.line) for finding in lint(broken.replace("\n", end))] == [("CC102", 94)]


def test_a_message_quotes_a_long_value_in_part() -> None:
    (one,) = lint(CLEAN.replace("MaxCount = 10", "MaxCount = ${" + "Far + " * 500))
    assert one.code == "CC105" and len(one.message) < 400


def test_a_project_may_define_specs_by_recipes_and_without_scripts(tmp_path: Path) -> None:
    extra = {"specs/execute/cluster-init/stages/install.sh": "true\n", "specs/chef/chef/site-cookbooks/a.rb": "a\n",
             "project.ini": PROJECT["project.ini"] + "[spec storage]\nrun_list = recipe[disks::oss]\n"}
    text = CLEAN.replace("[[[cluster-init training:execute:1.2.0]]]", "[[[cluster-init training:execute:1.2.0]]]\n"
                         "        [[[cluster-init training:storage]]]\n        [[[cluster-init training:chef]]]\n")
    assert findings_of({"project": extra}, text, tmp_path) == ()


def test_a_finding_names_the_parameter(tmp_path: Path) -> None:
    (one,) = findings_of({"params": {"GpuMachineType": "Standard_NC96ads_A100_v4"}}, CLEAN, tmp_path)
    assert "Standard_NC96ads_A100_v4 ($GpuMachineType)" in one.message


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, "\xff"])
def test_a_bad_file_of_parameters_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(HpcMpError, match="must be a JSON object"):
        read_parameters(file)
    with pytest.raises(HpcMpError, match="cannot be read"):
        read_parameters(tmp_path / "none.json")
    with pytest.raises(HpcMpError, match="must be a directory"):
        read_project(tmp_path / "none")


def test_odd_values_of_parameters_are_no_obstacle(tmp_path: Path) -> None:
    for value in (None, True, 1, 1.5, "", "x", [], ["a", None, [1]], {}, {"a": [1]}, float("inf"), -10**30):
        findings_of({"params": dict.fromkeys(("MaxGpuNodes", "Region", "GpuMachineType", "GpuImage", "NodeTags", "Tier"), value)},
                    CLEAN, tmp_path)


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["lint", *map(str, arguments)])


def test_the_command_prints_the_place_and_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "my template.txt"
    file.write_text(CLEAN, encoding="utf-8")
    done = call(file)
    assert (done.exit_code, done.output) == (0, "no findings\n")
    file.write_text(CLEAN.replace("slurm.dampen_memory = 5", "slurm.dampen_memroy = 5"), encoding="utf-8")
    done = call(file)
    assert done.exit_code == 0 and f"{file}:87: warning CC307 slurm.dampen_memroy" in done.output
    assert done.output.endswith("\n1 warning\n")
    file.write_text(CLEAN.replace("Extends = base\n    MachineType", "Extends = bas\n    MachineType"), encoding="utf-8")
    done = call(file, "--json")
    (first, *_) = json.loads(done.stdout)["findings"]
    assert done.exit_code == 1 and set(first) == {"code", "severity", "subject", "message", "fix", "file", "line"}
    assert "cannot be read" in str(call(tmp_path / "none.txt").exception)


def test_the_command_takes_parameters_and_a_project(tmp_path: Path) -> None:
    params = tmp_path / "params.json"
    params.write_text('{"MaxGpuNodes": 65}', encoding="utf-8")
    project = write_project(tmp_path, {SCRIPT: "#!/bin/bash\r\n"})
    done = call(GOLDEN / "clean.txt", "--params", params, "--project", project)
    assert done.exit_code == 1 and "CC508" in done.output and f"{project / SCRIPT}:1: error CC708" in done.output
