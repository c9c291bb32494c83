"""Rendered clusters: every size of the catalogue, their findings, their summary, and choices that are refused."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import cyclecloud_rendered
import pytest
from cyclecloud_rendered import FOLDER, GOLDEN, H100, OFFER, RECORDED, ready, record_of, rendered_by, summary_of, values_of

import hpc_mp
from cyclecloud_lint.rules import lint
from cyclecloud_lint.template import ParameterFile, parse, read_project
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import Finding
from hpc_mp.clouds.azure.render.options import Choices, settle
from hpc_mp.clouds.azure.render.summary import slurm_memory
from hpc_mp.environment.profiles import load_profiles
from hpc_mp.job import load_job

TEXT = cyclecloud_rendered.TEMPLATE.read_text(encoding="utf-8")
PROJECT = read_project(FOLDER)
CHOICES = tomllib.loads(Path(__file__).with_name("choices.toml").read_text(encoding="utf-8"))
SIZES = [size for size in OFFER.sizes.values() if not size.is_gone]
GONE = {"Standard_NC6s_v3", "Standard_NC12s_v3", "Standard_NC24s_v3", "Standard_NC24rs_v3"}


def findings(text: str, values: dict[str, Any]) -> tuple[Finding, ...]:
    return lint(text, file="t.txt", parameters=ParameterFile("p.json", json.dumps(values, indent=2), values), project=PROJECT)


# --- every size -------------------------------------------------------------------------------------------------------


def test_the_catalogue_is_consistent() -> None:
    for size in OFFER.sizes.values():
        assert size.vcpus > 0 and size.memory_gib > 0 and size.numa > 0 and size.placement_group_max in (100, 300), size.name
        assert size.arch in ("x86_64", "arm64") and size.generations and set(size.generations) <= {1, 2}, size.name
        assert bool(size.gpus) == bool(size.gpu) and bool(size.rdma) == bool(size.nics) == bool(size.rdma_gbps), size.name
        assert bool(size.rdma) == bool(re.search(r"\d[a-z]*r[a-z]*(G\d)?(_|$)", size.name.partition("_")[2])), "r is for RDMA"
        assert (not size.twin or OFFER.size(size.twin)) and size.quota and size.quota_vcpus >= size.vcpus, size.name
        assert re.fullmatch(r"(20\d\d-\d\d-\d\d)?", size.retired), size.name
    image = OFFER.image("microsoft-dsvm:ubuntu-hpc:2204:latest")
    assert image is not None and image is OFFER.image("Microsoft-DSVM:ubuntu-hpc:2204") and image.drivers == "nvidia"
    assert {image.drivers for image in OFFER.images.values()} == {"nvidia", "nvidia-v100", "rocm", "none", "unknown"}


def test_every_size_renders_to_a_cluster_without_a_fault() -> None:
    profiles = {profile.name for profile in load_profiles()}
    for size in SIZES:
        choices = cyclecloud_rendered.choices_of(size)
        codes = {finding.code for finding in findings(TEXT, values_of(choices))}
        assert codes == ({"CC504"} if size.retired else set()), size.name
        document = summary_of(choices).document()
        assert document["quota"][0]["family"] == size.quota and document["regional_vcpus"] >= size.quota_vcpus * choices.nodes
        assert size.profile in profiles and (OFFER.image(size.image) or (size.nvlink_block and not size.image)), size.name
    assert {size.name for size in OFFER.sizes.values() if size.is_gone} == GONE


@pytest.mark.parametrize("name", RECORDED)
def test_parameters_and_summary_are_as_recorded(name: str) -> None:
    assert record_of(OFFER.sizes[name.casefold()]) == (GOLDEN / "render" / f"{name}.txt").read_text(encoding="utf-8")
    assert {file.stem for file in (GOLDEN / "render").iterdir()} == set(RECORDED)


@pytest.mark.parametrize("file", ready(), ids=lambda file: file.stem)
def test_the_ready_parameters_are_what_their_command_writes(file: Path, tmp_path: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text == rendered_by(ready()[file], tmp_path / "out")
    assert findings(TEXT, json.loads(text)) == ()
    assert len(ready()) == 5 and {path.name for path in ready()} == {path.name for path in (FOLDER / "parameters").iterdir()}


# --- the template -----------------------------------------------------------------------------------------------------

CAPPED = ("${ifThenElse(HPCInfiniBand && MaxHPCExecuteNodeCount > HPCMaxScalesetSize, HPCMaxScalesetSize, "
          "MaxHPCExecuteNodeCount)}")


@pytest.mark.parametrize("fault", CHOICES["template"], ids=lambda fault: "-".join(fault["codes"]))
def test_a_fault_in_the_template_would_be_found(fault: dict[str, Any]) -> None:
    assert TEXT.count(fault["good"]) == 1 and lint(TEXT, project=PROJECT) == ()
    values = values_of(replace(H100, accounting=True, database="db.example.org", database_user="slurm"))
    assert {each.code for each in findings(TEXT.replace(fault["good"], fault["bad"]), values)} == {*fault["codes"]}


def test_more_nodes_than_a_group_holds_are_not_started_with_infiniband() -> None:
    values = values_of(H100) | {"MaxHPCExecuteNodeCount": 900}
    assert findings(TEXT, values) == ()
    assert findings(TEXT, values_of(replace(H100, sku="Standard_D96ads_v5")) | {"MaxHPCExecuteNodeCount": 900}) == ()
    assert [finding.code for finding in findings(TEXT.replace(CAPPED, "$MaxHPCExecuteNodeCount"), values)] == ["CC508"]


OPTIONAL = {"configuration_slurm_accounting_storageloc", "configuration_slurm_accounting_custom_certificate",
            "NFSSharedMountOptions", "AdditionalNFSMountOptions", "HpcMpTorchIndex", "about"}


def test_every_parameter_has_a_place_in_the_form_and_a_description() -> None:
    for section in parse(TEXT).walk():
        keys = {attribute.key for attribute in section.attributes}
        if section.kind == "parameter" and section.name != "about":
            assert {"label", "widget.label"} & keys and {"description", "widget.label"} & keys, section.name
            assert {"defaultvalue", "required", "conditions.required"} & keys or section.name in OPTIONAL, section.name
            assert "config.integeronly" not in keys or {"config.minvalue", "config.maxvalue"} <= keys, section.name


def test_the_template_names_the_release_at_hand() -> None:
    assert f"DefaultValue = hpc-mp=={hpc_mp.__version__}\n" in TEXT
    assert PROJECT.version == hpc_mp.__version__, "what its cluster-init sections name is checked by CC705"


def test_storage_is_mounted_from_its_address() -> None:
    values = values_of(replace(H100, storage="external", storage_address="10.0.0.9:/vol1"))
    assert (values["UseBuiltinShared"], values["NFSAddress"], values["NFSSharedExportPath"]) == (False, "10.0.0.9", "/vol1")
    values = values_of(replace(H100, storage="amlfs", storage_address="10.0.0.9"))
    lustre = (values["UseBuiltinShared"], values["AdditionalNFSAddress"], values["AdditionalNFSExportPath"])
    assert lustre == (True, "10.0.0.9", "")
    assert summary_of(replace(H100, storage="external")).open == ("NFSAddress",)


# --- the summary ------------------------------------------------------------------------------------------------------


def test_slurm_has_the_memory_that_azslurm_leaves() -> None:
    """The numbers are from slurmcc/partition.py of cyclecloud-slurm 4.0.9, by hand."""
    assert slurm_memory(OFFER.sizes["standard_nd96isr_h100_v5"]) == 1848320  # 1900 GiB less 5 %
    assert slurm_memory(OFFER.sizes["standard_d2as_v5"]) == 7168  # less 1 GiB


def test_quota_counts_every_machine_by_family_and_constrained_cores_as_the_whole_machine() -> None:
    constrained = summary_of(replace(H100, sku="Standard_HB120-16rs_v3", nodes=3))
    assert (constrained.quota[0].vcpus, constrained.quota[0].machines) == (360, "3 hpc × 120")
    (one,) = summary_of(replace(H100, sku="Standard_D16ads_v5", nodes=3, login_nodes=2, htc_nodes=5)).quota
    assert (one.family, one.vcpus) == ("standardDADSv5Family", 3 * 16 + 8 + 2 * 8 + 5 * 16)
    two = summary_of(replace(H100, login_nodes=0, htc_nodes=0)).quota
    assert [(quota.family, quota.vcpus) for quota in two] == [("standardNDSH100v5Family", 384), ("standardDADSv5Family", 8)]
    assert "     528  Total Regional vCPUs" in "\n".join(summary_of(H100).words())  # 4 × 96 + 8 + 8 + 8 × 16


def test_the_lines_for_a_job_file_are_a_job_file(tmp_path: Path) -> None:
    rest = ('[model]\nconfig = { model_type = "gpt2" }\n[data]\nfiles = ["x"]\nsequence_length = 8\n'
            "[train]\nsteps = 1\nglobal_batch = 32\n")
    file = tmp_path / "job.toml"
    file.write_text("\n".join(summary_of(H100).job) + "\n" + rest, encoding="utf-8")
    job = load_job(file)
    assert (job.job.nodes, job.job.ranks_per_node, job.slurm.partition, job.environment.profile) == (4, 8, "hpc", "azure-ndv5")


@pytest.mark.parametrize("row", CHOICES["noted"], ids=lambda row: row["says"])
def test_a_note_is_printed_only_if_it_holds(row: dict[str, Any]) -> None:
    assert row["says"] in "\n".join(summary_of(replace(H100, **row["changes"])).words())
    assert row["says"] not in "\n".join(summary_of(H100).words())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", CHOICES["refused"], ids=lambda row: str(row["changes"]))
def test_a_wrong_choice_is_refused_with_its_rule_and_its_remedy(row: dict[str, Any]) -> None:
    with pytest.raises(HpcMpError) as refused:
        settle(replace(H100, **row["changes"]), OFFER)
    assert [words for words in row["says"] if words.casefold() not in str(refused.value).casefold()] == []


def test_the_largest_clusters_are_allowed() -> None:
    for sku, nodes in (("ND96isr_H100_v5", 100), ("Standard_HB176rs_v4", 300), ("standard_d8ads_v5", 1000)):
        assert settle(Choices(sku, nodes), OFFER).choices.nodes == nodes
