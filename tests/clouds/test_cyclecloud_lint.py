"""The linter of cluster templates: a planted fault for every rule on its line, a clean template, the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cyclecloud_cases import CASES, CLEAN, GOLDEN, PROJECT, expected, findings_of, planted, write_project

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.cloud import command
from hpc_mp.clouds.azure.files import read_parameters, read_project
from hpc_mp.clouds.azure.rules import RULES, lint

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


@pytest.mark.parametrize("params", [
    {"GpuMachineType": "Standard_ND96isr_MI300X_v5", "GpuImage": "microsoft-dsvm:ubuntu-hpc:2204-rocm:22.04.1"},
    {"GpuMachineType": "Standard_ND40rs_v2", "GpuImage": "microsoft-dsvm:ubuntu-hpc:2204-v100:22.04.1"},
    {"GpuMachineType": "Standard_HB176rs_v4", "MaxGpuNodes": 64},
    {"GpuMachineType": "Standard_ND128isr_GB300_v6", "GpuImage": "/subscriptions/0/images/arm", "MaxGpuNodes": 36},
    {"GpuMachineType": "Standard_M999_of_tomorrow_v9", "GpuImage": "mypublisher:myoffer:mysku:1.0.0"},
], ids=lambda params: params["GpuMachineType"])
def test_sizes_and_images_that_go_together(params: dict[str, Any], tmp_path: Path) -> None:
    assert findings_of({"params": params}, CLEAN, tmp_path) == ()


def test_case_and_line_ends_do_not_count() -> None:
    assert lint(CLEAN.replace("\n", "\r\n")) == lint("\ufeff" + CLEAN) == ()
    loud = CLEAN.replace("[[nodearray gpu]]", "[[NodeArray gpu]]").replace("MaxCount = 10", "MAXCOUNT = 10")
    assert lint(loud.replace("Extends = base", "EXTENDS = BASE").replace("    ", "\t")) == ()
    broken = CLEAN.replace("MaxCount = 10", "MaxCount = 10\nnonsense")
    for end in ("\n", "\r\n", "\r"):
        assert [(finding.code, finding.line) for finding in lint(broken.replace("\n", end))] == [("CC102", 94)]


@pytest.mark.parametrize(("find", "put"), [
    ("slurm.dampen_memory = 5", "slurm.dampen_memory = ${Shares[GpuMachineType]}"),
    ("slurm.dampen_memory = 5", "slurm.dampen_memory = ${Shares.Standard_ND96isr_H100_v5}"),
    ("MaxCount = 10", "MaxCount = ${regexp(\"_HB\", GpuMachineType) ? 10 : 20}"),
    ("MaxCount = 10", "MaxCount = ${MaxGpuNodes / 2 - 1}"),
    ("MaxCount = 10\n", "MaxCount = 10\n    Publisher = a\n    Tags.Sum = $HtcPrice-$Region\n"),
], ids=range(5))
def test_what_is_not_evaluated_is_not_judged(find: str, put: str) -> None:
    assert lint(CLEAN.replace(find, put)) == ()


def test_a_cluster_without_slurm_is_not_judged_by_its_rules() -> None:
    assert lint("[cluster Storage]\n[[nodearray disks]]\nInitialCount = 4\nMachineType = Standard_D8as_v5\n"
                "ImageName = cycle.image.ubuntu22\nSubnetId = g/v/s\nRegion = westeurope\nCredentials = azure\n") == ()


def test_a_placement_group_that_is_off_is_reported_once() -> None:
    text = CLEAN.replace("slurm.hpc = true", "slurm.hpc = false").replace("    Azure.MaxScalesetSize = 64", "    Zone = 1, 2")
    assert [finding.code for finding in lint(text)] == ["CC507"]


def test_a_message_quotes_a_long_value_in_part() -> None:
    (one,) = lint(CLEAN.replace("MaxCount = 10", "MaxCount = ${" + "Far + " * 500))
    assert one.code == "CC105" and len(one.message) < 400


def test_a_project_may_define_specs_by_recipes_and_without_scripts(tmp_path: Path) -> None:
    extra = {"specs/execute/cluster-init/stages/install.sh": "true\n", "specs/chef/chef/site-cookbooks/a.rb": "a\n",
             "project.ini": PROJECT["project.ini"] + "[spec storage]\nrun_list = recipe[disks::oss]\n"}
    text = CLEAN.replace("[[[cluster-init training:execute:1.2.0]]]", "[[[cluster-init training:execute:1.2.0]]]\n"
                         "        [[[cluster-init training:storage]]]\n        [[[cluster-init training:chef]]]\n")
    assert findings_of({"project": extra}, text, tmp_path) == ()


# --- resolution -------------------------------------------------------------------------------------------------------


def test_a_finding_names_the_parameter(tmp_path: Path) -> None:
    (one,) = findings_of({"params": {"GpuMachineType": "Standard_NC96ads_A100_v4"}}, CLEAN, tmp_path)
    assert "Standard_NC96ads_A100_v4 ($GpuMachineType)" in one.message


def test_conditions_are_evaluated() -> None:
    text = CLEAN.replace("EnableNodeHealthChecks = true", "EnableNodeHealthChecks = ${MaxGpuNodes > 100 || !Autoscale}")
    assert [finding.code for finding in lint(text)] == ["CC407"]
    assert lint(text.replace("MaxGpuNodes > 100", "MaxGpuNodes < 100")) == ()
    assert lint(text.replace("MaxGpuNodes > 100", "Credentials == \"x\"")) == (), "a value that is unknown is not judged"


def test_a_value_of_the_file_precedes_the_default_and_null_does_not(tmp_path: Path) -> None:
    assert [finding.code for finding in findings_of({"params": {"maxgpunodes": 65}}, CLEAN, tmp_path)] == ["CC508"]
    assert findings_of({"params": {"MaxGpuNodes": None}}, CLEAN, tmp_path) == ()


def test_the_later_base_precedes_and_undefined_cancels() -> None:
    base = "    [[node bad]]\n    Abstract = true\n    MachineType = Standard_NC24s_v3\n\n    [[nodearray htc]]\n"
    text = CLEAN.replace("    [[nodearray htc]]\n", base).replace("    MachineType = Standard_D8ads_v5\n", "")
    late = text.replace("Extends = base\n    ImageName = cycle", "Extends = base, bad\n    ImageName = cycle")
    assert "CC503" in {finding.code for finding in lint(late)}
    cancelled = late.replace("    MaxCount = 10\n", "    MaxCount = 10\n    MachineType := undefined\n")
    assert "CC301" in {finding.code for finding in lint(cancelled)}


def test_two_dynamic_arrays_may_share_a_partition() -> None:
    text = CLEAN.replace("partition = htc", "partition = gpu\n        dynamic_feature := \"dyn\"")
    assert [finding.code for finding in lint(text)] == ["CC403"]
    assert lint(text.replace("slurm.dampen_memory = 5", "slurm.dynamic_feature := \"big\"")) == ()


# --- other files, the command -----------------------------------------------------------------------------------------


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
