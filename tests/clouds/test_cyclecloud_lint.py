"""The linter of cluster templates: a planted fault for every rule on its line, a clean template, the command, the documents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cyclecloud_cases import CASES, CLEAN, GOLDEN, PROJECT, expected, found, planted, write_project

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.cloud import command
from hpc_mp.clouds.azure import lint, read_given, read_project
from hpc_mp.clouds.azure.rules import RULES

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "specs/execute/cluster-init/scripts/20-venv.sh"
IDS = [f"{case['code']}-{at}" for at, case in enumerate(CASES)]


# --- planted faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_planted_fault_is_found_on_its_line(case: dict[str, Any], tmp_path: Path) -> None:
    text = planted(case)
    findings = found(case, text, tmp_path)
    mine = [finding for finding in findings if finding.code == case["code"]]
    assert len(mine) == case.get("lines", 1), findings
    assert expected(case, text) in [finding.line for finding in mine], mine
    file = case.get("file", "")
    where = tmp_path / "params.json" if file == "params" else tmp_path / "a project" / file
    assert {finding.file for finding in mine} == {str(where) if file else "t.txt"}
    others = {finding.code for finding in findings if finding.severity != "info"} - {case["code"]}
    assert others <= set(case.get("also", ())), findings


@pytest.mark.parametrize("case", [case for case in CASES if "find" in case],
                         ids=[name for name, case in zip(IDS, CASES, strict=True) if "find" in case])
def test_it_is_the_edit_that_is_found(case: dict[str, Any], tmp_path: Path) -> None:
    clean = found({key: value for key, value in case.items() if key != "params"}, CLEAN, tmp_path)
    assert case["code"] not in {finding.code for finding in clean}


def test_every_rule_has_a_planted_fault_and_a_code_of_its_own() -> None:
    codes = [rule.code for rule in RULES]
    assert sorted(codes) == sorted(set(codes))
    assert {case["code"] for case in CASES} == set(codes)
    assert len(codes) >= 35 and len(CASES) >= 60


def test_every_finding_says_what_and_what_to_do(tmp_path: Path) -> None:
    for at, case in enumerate(CASES):
        folder = tmp_path / str(at)
        folder.mkdir()
        for finding in found(case, planted(case), folder):
            assert not re.search(r"\{(it|advice)\}", finding.message + finding.fix) and finding.message[-1] in ".?"
            assert finding.fix[-1] in ".?" and finding.fix == finding.fix.strip()


# --- clean ones -------------------------------------------------------------------------------------------------------


def test_the_clean_template_and_its_project_have_no_finding(tmp_path: Path) -> None:
    assert lint(CLEAN) == ()
    assert found({"params": {"Region": "westeurope", "SubnetId": "g/v/s"}, "project": {}}, CLEAN, tmp_path) == ()


@pytest.mark.parametrize(("params", "codes"), [
    ({"GpuMachineType": "Standard_ND96isr_H200_v5"}, set()),
    ({"GpuMachineType": "Standard_ND96isr_MI300X_v5", "GpuImage": "microsoft-dsvm:ubuntu-hpc:2204-rocm:22.04.1"}, set()),
    ({"GpuMachineType": "Standard_ND40rs_v2", "GpuImage": "microsoft-dsvm:ubuntu-hpc:2204-v100:22.04.1"}, set()),
    ({"GpuMachineType": "Standard_HB176rs_v4", "MaxGpuNodes": 64}, set()),
    ({"GpuMachineType": "Standard_ND128isr_GB300_v6", "GpuImage": "/subscriptions/0/images/arm", "MaxGpuNodes": 36}, set()),
    ({"GpuMachineType": "Standard_M999_of_tomorrow_v9"}, set()),
    ({"GpuImage": "mypublisher:myoffer:mysku:1.0.0"}, set()),
], ids=lambda value: next(iter(value.values()), "") if isinstance(value, dict) else "")
def test_sizes_and_images_that_go_together(params: dict[str, Any], codes: set[str], tmp_path: Path) -> None:
    assert {finding.code for finding in found({"params": params}, CLEAN, tmp_path)} == codes


def test_case_and_line_ends_do_not_count() -> None:
    assert lint(CLEAN.replace("\n", "\r\n")) == lint("\ufeff" + CLEAN) == ()
    loud = CLEAN.replace("[[nodearray gpu]]", "[[NodeArray gpu]]").replace("MaxCount = 10", "MAXCOUNT = 10")
    assert lint(loud.replace("Extends = base", "EXTENDS = BASE").replace("    ", "\t")) == ()


def test_a_line_is_counted_the_same_whichever_its_end() -> None:
    broken = CLEAN.replace("MaxCount = 10", "MaxCount = 10\ufffd")
    lines = {tuple((each.code, each.line) for each in lint(broken.replace("\n", end))) for end in ("\n", "\r\n", "\r")}
    assert len(lines) == 1


# --- what real templates do and nothing is wrong with ------------------------------------------------------------------


@pytest.mark.parametrize(("find", "put"), [
    ("slurm.dampen_memory = 5", "slurm.dampen_memory = ${Shares[GpuMachineType]}"),
    ("slurm.dampen_memory = 5", "slurm.dampen_memory = ${Shares.Standard_ND96isr_H100_v5}"),
    ("MaxCount = 10", "MaxCount = ${regexp(\"_HB\", GpuMachineType) ? 10 : Shares[\"x\"]}"),
    ("MaxCount = 10", "MaxCount = ${Shares.x}\n    Tags.Sum = $HtcPrice-$Region"),
], ids=range(4))
def test_records_their_entries_and_the_functions_of_expressions(find: str, put: str) -> None:
    record = "        [[[parameter Shares]]]\n        ParameterType = hidden\n            [[[[record DefaultValue]]]]\n" \
             "            Standard_ND96isr_H100_v5 = 5\n\n        [[[parameter HtcSpot]]]\n"
    assert lint(CLEAN.replace("        [[[parameter HtcSpot]]]\n", record).replace(find, put)) == ()


@pytest.mark.parametrize("spec", ["pyxis:4.0.2", "master:2.1.4"])
def test_specs_that_older_releases_of_slurm_had(spec: str) -> None:
    extra = f"[[[cluster-init cyclecloud/slurm:login]]]\n        [[[cluster-init cyclecloud/slurm:{spec}]]]"
    assert lint(CLEAN.replace("[[[cluster-init cyclecloud/slurm:login]]]", extra)) == ()
    (one,) = lint(CLEAN.replace("[[[cluster-init cyclecloud/slurm:login]]]", extra.replace(f":{spec}", f":{spec.split(':')[0]}")))
    assert one.code == "CC424", "the newest release has it no more"


def test_an_old_scheduler_and_an_image_in_four_attributes() -> None:
    old = CLEAN.replace("        slurm.role = scheduler\n", "").replace("cyclecloud/slurm:scheduler", "slurm:master:2.1.4")
    assert lint(old) == ()
    parts = "    Azure.Publisher = OpenLogic\n    Azure.Offer = CentOS\n    Azure.Sku = 7.3\n    Azure.ImageVersion = latest\n"
    login = CLEAN.index("[[nodearray login]]")
    image = "    ImageName = microsoft-dsvm:ubuntu-hpc:2204:22.04.2025081901\n"
    assert lint(CLEAN[:login] + CLEAN[login:].replace(image, parts, 1)) == ()


def test_a_second_scheduler_may_be_reached_and_nothing_scales_where_autoscale_is_left_out() -> None:
    second = "    [[nodearray second]]\n    Extends = scheduler\n    MaxCount = 1\n    ComputerName := undefined\n\n" \
             "    [[nodearray login]]\n"
    public = CLEAN.replace("[[[parameter PublicScheduler]]]\n        Label = Public Head Node\n        ParameterType = Boolean\n"
                           "        DefaultValue = false", "[[[parameter PublicScheduler]]]\n        DefaultValue = true")
    assert lint(public.replace("    [[nodearray login]]\n", second)) == ()
    storage = "[cluster Storage]\n[[nodearray disks]]\nInitialCount = 4\nMachineType = Standard_D8as_v5\n" \
              "ImageName = cycle.image.ubuntu22\nSubnetId = g/v/s\nRegion = westeurope\nCredentials = azure\n"
    assert lint(storage) == ()


def test_a_placement_group_that_is_off_is_said_once() -> None:
    text = CLEAN.replace("slurm.hpc = true", "slurm.hpc = false")
    text = text.replace("    Azure.MaxScalesetSize = 64", "    Azure.SinglePlacementGroup = false")
    assert [finding.code for finding in lint(text)] == ["CC507"]


def test_a_message_quotes_a_long_value_in_part() -> None:
    found = lint(CLEAN.replace("DefaultValue = westeurope", "DefaultValue = " + "Far " * 5000))
    (one,) = (each for each in found if each.code == "CC323")
    assert len(one.message) < 400


def test_what_projects_of_azure_hold_beside_scripts(tmp_path: Path) -> None:
    extra = {"specs/execute/cluster-init/stages/install.sh": "#!/bin/bash\n",
             "specs/execute/cluster-init/templates/a.conf": "a\n", "specs/chef/chef/site-cookbooks/a.rb": "a\n",
             "blobs/more/x.zip": "x",
             "project.ini": PROJECT["project.ini"].replace("Files = wheel.tgz", "Files = wheel.tgz, more/x.zip")
             + "[spec storage]\nrun_list = recipe[disks::oss]\n"}
    text = CLEAN.replace("[[[cluster-init training:execute:1.2.0]]]", "[[[cluster-init training:execute:1.2.0]]]\n"
                         "        [[[cluster-init training:storage]]]\n        [[[cluster-init training:chef]]]\n")
    assert found({"project": extra}, text, tmp_path) == ()


# --- resolution -------------------------------------------------------------------------------------------------------


def test_a_finding_names_the_parameter_and_the_line_where_the_value_was_set(tmp_path: Path) -> None:
    (one,) = found({"params": {"GpuMachineType": "Standard_NC96ads_A100_v4"}}, CLEAN, tmp_path)
    assert "Standard_NC96ads_A100_v4 ($GpuMachineType)" in one.message


def test_conditions_are_worked_out() -> None:
    text = CLEAN.replace("EnableNodeHealthChecks = true", "EnableNodeHealthChecks = ${MaxGpuNodes > 100 || !Autoscale}")
    assert [finding.code for finding in lint(text)] == ["CC407"]
    assert lint(text.replace("MaxGpuNodes > 100", "MaxGpuNodes < 100")) == ()
    assert lint(text.replace("MaxGpuNodes > 100", "Credentials == \"x\"")) == (), "what depends on an unknown value is not judged"


def test_what_is_given_counts_over_the_default_and_null_does_not(tmp_path: Path) -> None:
    assert [each.code for each in found({"params": {"MaxGpuNodes": 65}}, CLEAN, tmp_path)] == ["CC508"]
    assert found({"params": {"MaxGpuNodes": None}}, CLEAN, tmp_path) == ()
    both = found({"params": {"MaxGpuNodes": None, "maxgpunodes": 65}}, CLEAN, tmp_path)
    assert {each.code for each in both} == {"CC508"}


def test_the_later_base_counts_and_undefined_cancels() -> None:
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


# --- input of the other files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "rule"), [
    ("{", "is no JSON"), ("[]", "is no JSON object"), ("[" * 100_000, "is n"), ("\xff", "is not UTF-8"),
])
def test_a_bad_file_of_parameters_is_refused(text: str, rule: str, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(HpcMpError, match=rule):
        read_given(file)
    with pytest.raises(HpcMpError, match="cannot be read"):
        read_given(tmp_path / "none.json")


def test_odd_values_of_parameters_are_no_obstacle(tmp_path: Path) -> None:
    for value in (None, True, 1, 1.5, "", "x", [], ["a", None, [1]], {}, {"a": [1]}, float("inf"), -10**30):
        found({"params": dict.fromkeys(("MaxGpuNodes", "Region", "GpuMachineType", "GpuImage", "NodeTags", "Tier"), value)},
              CLEAN, tmp_path)


def test_a_project_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match="is no directory"):
        read_project(tmp_path / "none")


# --- the command ------------------------------------------------------------------------------------------------------


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["lint", *map(str, arguments)])


def test_the_command_says_where_what_and_how_to_mend_it(tmp_path: Path) -> None:
    file = tmp_path / "my template.txt"
    file.write_text(CLEAN, encoding="utf-8")
    done = call(file)
    assert (done.exit_code, done.output) == (0, "no findings\n")

    file.write_text(CLEAN.replace("slurm.dampen_memory = 5", "slurm.dampen_memroy = 5"), encoding="utf-8")
    done = call(file)
    assert done.exit_code == 0 and f"{file}:87: warning CC413 slurm.dampen_memroy" in done.output
    assert done.output.endswith("\n1 warning\n")

    file.write_text(CLEAN.replace("Extends = base\n    MachineType", "Extends = bas\n    MachineType"), encoding="utf-8")
    done = call(file, "--json")
    assert done.exit_code == 1
    (first, *_) = json.loads(done.stdout)["findings"]
    assert set(first) == {"code", "severity", "subject", "message", "fix", "file", "line"}


def test_the_command_takes_parameters_and_a_project(tmp_path: Path) -> None:
    params = tmp_path / "params.json"
    params.write_text('{"MaxGpuNodes": 65}', encoding="utf-8")
    project = write_project(tmp_path, {SCRIPT: "#!/bin/bash\r\n"}, {})
    done = call(GOLDEN / "clean.txt", "--params", params, "--project", project)
    assert done.exit_code == 1 and "CC508" in done.output and f"{project / SCRIPT}:1: error CC710" in done.output


def test_a_template_that_cannot_be_read_is_wrong_input(tmp_path: Path) -> None:
    done = call(tmp_path / "none.txt")
    assert isinstance(done.exception, HpcMpError) and "cannot be read" in str(done.exception)
