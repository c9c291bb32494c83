"""Rendered clusters: every size of the catalogue, what the linter says of them, what is printed, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cyclecloud_rendered import (
    CATALOGUE,
    FOLDER,
    GOLDEN,
    H100,
    RECORDED,
    TEMPLATE,
    choices_of,
    grave,
    ready,
    record_of,
    rendered_by,
    values_of,
)

import hpc_mp
from hpc_mp.base.errors import HpcMpError
from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure import Finding, lint, read_project
from hpc_mp.clouds.azure.parameters import Given, declared
from hpc_mp.clouds.azure.render import Choices, azure_summary, settle, words
from hpc_mp.clouds.azure.render.summary import slurm_lines
from hpc_mp.clouds.azure.render.write import as_json
from hpc_mp.clouds.azure.template import parse
from hpc_mp.environment.profiles import load_profiles
from hpc_mp.job import load_job

TEXT = TEMPLATE.read_text(encoding="utf-8")
PROJECT = read_project(FOLDER)
SIZES = [size for size in CATALOGUE.sizes.values() if not size.is_gone]
GONE = ["Standard_NC6s_v3", "Standard_NC12s_v3", "Standard_NC24s_v3", "Standard_NC24rs_v3"]


def findings(text: str, values: dict[str, Any] | None) -> tuple[Finding, ...]:
    given = None if values is None else Given("parameters.json", as_json(values), values)
    return lint(text, file="t.txt", given=given, project=PROJECT)


# --- every size -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_every_size_renders_to_a_cluster_without_a_fault_and_is_told_with_its_figures(size: MachineType) -> None:
    found = findings(TEXT, values_of(choices_of(size)))
    assert grave(found) == []
    codes = {each.code for each in found}
    assert codes == {"CC215"} | ({"CC504"} if size.retired else set())
    choices = choices_of(size)
    said = azure_summary(settle(choices, CATALOGUE), CATALOGUE)
    assert values_of(choices)["HPCMachineType"] == size.name and said.sku == size.name
    assert said.quota[0].family == size.quota and said.regional_vcpus >= size.quota_vcpus * choices.nodes
    assert f"CPUs={size.vcpus} " in said.azure_conf[1] and (f"Gres=gpu:{size.gpus}" in said.azure_conf[1]) == bool(size.gpus)
    assert (said.gpus, said.gpu_model, said.nics, said.network, said.profile) == (
        size.gpus, size.gpu_title, size.nics, size.rdma, size.profile)


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_written_and_told_is_as_recorded(name: str) -> None:
    assert record_of(CATALOGUE.sizes[name.casefold()]) == (GOLDEN / "render" / f"{name}.txt").read_text(encoding="utf-8")


def test_there_is_a_record_of_those_and_of_no_other() -> None:
    assert {file.stem for file in (GOLDEN / "render").iterdir()} == set(RECORDED)


def test_retired_sizes_are_refused_by_design() -> None:
    assert sorted(size.name for size in CATALOGUE.sizes.values() if size.is_gone) == sorted(GONE)
    for name in GONE:
        with pytest.raises(HpcMpError, match="was retired on 2025-09-30"):
            settle(Choices(name, 1), CATALOGUE)


def test_a_size_has_a_profile_that_there_is_and_an_image_that_fits() -> None:
    profiles = {profile.name for profile in load_profiles()}
    for size in SIZES:
        assert size.profile in profiles
        image = CATALOGUE.image(size.image)
        assert image is not None or (size.nvlink_block and not size.image)
        settle(Choices(size.name, 1, image=size.image or None), CATALOGUE)  # it would be refused if it did not fit


@pytest.mark.parametrize("file", ready(), ids=lambda file: file.stem)
def test_the_ready_parameters_are_what_their_command_writes(file: Path, tmp_path: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text == rendered_by(ready()[file], tmp_path / "out")
    found = findings(TEXT, json.loads(text))
    assert grave(found) == []
    nulls = {name for name, value in json.loads(text).items() if value is None}
    assert nulls >= {"Region", "SubnetId", "Credentials"}
    assert nulls == {each.message.split()[0] for each in found if each.code == "CC215"}


def test_there_are_five_ready_files() -> None:
    assert {file.name for file in ready()} == {path.name for path in (FOLDER / "parameters").iterdir()}
    assert len(ready()) == 5


# --- the template -----------------------------------------------------------------------------------------------------

PLANTED = (  # what is spoiled, with what, the codes that are found for it
    ("slurm.partition = htc", "slurm.partition = htc\n        slurm.default_partition = true", {"CC401"}),
    ("slurm.partition = htc", "slurm.partition = hpc", {"CC403"}),
    ("slurm.hpc = $HPCInfiniBand", "slurm.hpc = ${!HPCInfiniBand}", {"CC507"}),
    ("    MaxCount = ${ifThenElse(HPCInfiniBand && MaxHPCExecuteNodeCount > HPCMaxScalesetSize, HPCMaxScalesetSize, "
     "MaxHPCExecuteNodeCount)}", "    MaxCount = 150", {"CC508"}),
    ("    Interruptible = false", "    Azure.SinglePlacementGroup = false", {"CC512"}),
    ("    EnableNodeHealthChecks = $EnableNodeHealthChecks\n", "", {"CC407"}),
    ("slurm.dampen_memory = $DampenMemory", "slurm.dampen_memory = 0.05", {"CC408"}),
    ("slurm.dampen_memory = $DampenMemory", "slurm.dampen_memroy = $DampenMemory", {"CC413"}),
    ('DefaultValue = "SuspendTime=1800"', 'DefaultValue = "SuspendTime=60"', {"CC421"}),
    ('DefaultValue = "SuspendTime=1800"', 'DefaultValue = "TopologyPlugin=topology/block"', {"CC410"}),
    ("        slurm.accounting.user = $configuration_slurm_accounting_user\n", "", {"CC406"}),
    ("slurm.accounting.password = $configuration_slurm_accounting_password", "slurm.accounting.password = hunter2",
     {"CC213"}),
    ("    SubnetId = $SubnetId\n", "", {"CC301"}),
    ("    ImageName = $HPCImageName\n", "", {"CC302"}),
    ("    Extends = nodearraybase\n    MachineType = $HTC", "    Extends = nodearaybase\n    MachineType = $HTC",
     {"CC303", "CC423"}),
    ("$HpcMpProfile", "$HpcMpProfil", {"CC201"}),
    ("        munge.user.gid = 11101\n", "        slurm.user.uidd = 3\n", {"CC413"}),
    ("[[[cluster-init hpc-mp:scheduler:0.1.0]]]", "[[[cluster-init hpc-mp:schedular:0.1.0]]]", {"CC704"}),
    ("[[[cluster-init hpc-mp:scheduler:0.1.0]]]", "[[[cluster-init hpc-mp:scheduler:0.0.9]]]", {"CC705"}),
)


@pytest.mark.parametrize(("good", "bad", "codes"), PLANTED,
                         ids=[f"{at}-{'-'.join(sorted(row[2]))}" for at, row in enumerate(PLANTED)])
def test_a_fault_in_the_template_would_be_found(good: str, bad: str, codes: set[str]) -> None:
    assert TEXT.count(good) == 1
    values = values_of(replace(H100, accounting=True, database="db.example.org", database_user="slurm"))
    found = {each.code for each in findings(TEXT.replace(good, bad), values) if each.severity != "info"}
    assert codes <= found <= codes | {"CC201", "CC202"}, found


def test_by_itself_the_template_has_no_fault() -> None:
    assert grave(findings(TEXT, None)) == []


def test_more_nodes_than_a_group_holds_are_not_made_with_infiniband() -> None:
    values = values_of(H100) | {"MaxHPCExecuteNodeCount": 900}
    assert grave(findings(TEXT, values)) == []
    without = values_of(replace(H100, sku="Standard_D96ads_v5")) | {"MaxHPCExecuteNodeCount": 900}
    assert grave(findings(TEXT, without)) == []
    uncapped = TEXT.replace("${ifThenElse(HPCInfiniBand && MaxHPCExecuteNodeCount > HPCMaxScalesetSize, HPCMaxScalesetSize, "
                            "MaxHPCExecuteNodeCount)}", "$MaxHPCExecuteNodeCount")
    assert [line.split()[0] for line in grave(findings(uncapped, values))] == ["CC508"]


OPTIONAL = ("configuration_slurm_accounting_storageloc", "configuration_slurm_accounting_custom_certificate",
            "NFSSharedMountOptions", "AdditionalNFSExportPath", "AdditionalNFSMountOptions", "HpcMpTorchIndex")


def test_every_parameter_has_a_place_in_the_form_and_says_what_it_is_for() -> None:
    for each in declared(parse(TEXT).walk()):
        if each.is_label:
            continue
        given = set(each.attributes)
        assert {"label", "widget.label"} & given, each.name
        assert {"description", "widget.label"} & given, each.name
        settled = "defaultvalue" in given or each.text("required") == "true" or "conditions.required" in given
        assert settled or each.name in OPTIONAL, f"{each.name} has neither a default nor a demand"
        if "config.integeronly" in given:
            assert {"config.minvalue", "config.maxvalue"} <= given, each.name


def test_the_template_names_the_release_at_hand() -> None:
    assert f"DefaultValue = hpc-mp=={hpc_mp.__version__}\n" in TEXT
    assert PROJECT.version == hpc_mp.__version__, "what its cluster-init sections name is checked by CC705"


def test_storage_is_mounted_from_where_it_was_said() -> None:
    values = values_of(replace(H100, storage="external", storage_address="10.0.0.9:/vol1"))
    assert (values["UseBuiltinShared"], values["NFSAddress"], values["NFSSharedExportPath"]) == (False, "10.0.0.9", "/vol1")
    values = values_of(replace(H100, storage="amlfs", storage_address="10.0.0.9"))
    lustre = (values["UseBuiltinShared"], values["AdditionalNFSAddress"], values["AdditionalNFSExportPath"])
    assert lustre == (True, "10.0.0.9", "")
    assert grave(findings(TEXT, values)) == []
    assert "CC209" in " ".join(grave(findings(TEXT, values | {"AdditionalNFSType": "nfs"})))


def test_nothing_starts_before_what_is_missing_was_chosen() -> None:
    """What Conditions.Required demands is required where the condition holds, and only there."""
    values = values_of(replace(H100, storage="external"))
    assert {each.message.split()[0] for each in findings(TEXT, values) if each.code == "CC215"} == {"NFSAddress"}
    del values["NFSAddress"]
    assert [line.split()[0] for line in grave(findings(TEXT, values))] == ["CC209"]
    assert grave(findings(TEXT, values | {"UseBuiltinShared": True})) == []


# --- what is told -----------------------------------------------------------------------------------------------------


def test_the_lines_of_slurm_are_those_of_azslurm() -> None:
    """Worked out by hand from slurmcc/partition.py and slurmcc/cli.py of cyclecloud-slurm 4.0.9."""
    h100, small = CATALOGUE.sizes["standard_nd96isr_h100_v5"], CATALOGUE.sizes["standard_f2s_v2"]
    found = slurm_lines("My Cluster", "hpc", h100, 16, default=True, one_thread=False)
    assert found.node == ("Nodename=My-Cluster-hpc-[1-16] Feature=cloud STATE=CLOUD CPUs=96 ThreadsPerCore=1 "
                          "RealMemory=1848320 Gres=gpu:8")  # 1900 GiB = 1945600 MiB, less 5 %
    assert found.partition == ("PartitionName=hpc Nodes=My-Cluster-hpc-[1-16] Default=YES DefMemPerCPU=19253 "
                               "MaxTime=INFINITE State=UP")
    assert found.gres == "Nodename=My-Cluster-hpc-[1-16] Name=gpu Count=8 File=/dev/nvidia[0-7]"
    found = slurm_lines("c", "htc", small, 1, default=False, one_thread=False)
    assert found.node == ("Nodename=c-htc-1 Feature=cloud STATE=CLOUD CPUs=2 ThreadsPerCore=2 "
                          "RealMemory=3072")  # less 1 GiB, not 5 %
    assert "Default=NO DefMemPerCPU=1536" in found.partition and found.gres == ""
    amd = slurm_lines("c", "hpc", CATALOGUE.sizes["standard_nd96isr_mi300x_v5"], 2, default=True, one_thread=False)
    assert amd.gres.endswith("File=/dev/dri/renderD[128,136,144,152,160,168,176,184]")


@pytest.mark.parametrize(("sku", "whole"), [("Standard_HB120-16rs_v3", 120), ("Standard_HC44-32rs", 44),
                                            ("Standard_HB368-48rs_v5", 368), ("Standard_HX176rs", 176)])
def test_a_quota_counts_constrained_cores_as_the_whole_machine(sku: str, whole: int) -> None:
    plan = settle(replace(H100, sku=sku, nodes=3), CATALOGUE)
    found = azure_summary(plan, CATALOGUE)
    assert (found.quota[0].vcpus, found.quota[0].machines) == (3 * whole, f"3 hpc × {whole}")
    assert any(f"{whole} vCPUs of the quota each" in note for note in found.notes) == (plan.size.vcpus < whole)
    assert f"CPUs={plan.size.vcpus} " in found.azure_conf[1]


def test_quota_counts_every_machine_by_family() -> None:
    found = azure_summary(
        settle(replace(H100, sku="Standard_D16ads_v5", nodes=3, login_nodes=2, htc_nodes=5), CATALOGUE), CATALOGUE)
    (one,) = found.quota
    assert (one.family, one.vcpus) == ("standardDADSv5Family", 3 * 16 + 8 + 2 * 8 + 5 * 16)
    two = azure_summary(settle(replace(H100, login_nodes=0, htc_nodes=0), CATALOGUE), CATALOGUE).quota
    assert [(each.family, each.vcpus) for each in two] == [("standardNDSH100v5Family", 384), ("standardDADSv5Family", 8)]
    whole = azure_summary(settle(H100, CATALOGUE), CATALOGUE)
    assert whole.regional_vcpus == 4 * 96 + 8 + 8 + 8 * 16
    assert "     528  Total Regional vCPUs" in "\n".join(words(whole))


def test_the_lines_for_a_job_file_are_a_job_file(tmp_path: Path) -> None:
    lines = azure_summary(settle(H100, CATALOGUE), CATALOGUE).job
    rest = ('[model]\nconfig = { model_type = "gpt2" }\n[data]\nfiles = ["x"]\nsequence_length = 8\n'
            "[train]\nsteps = 1\nglobal_batch = 32\n")
    file = tmp_path / "job.toml"
    file.write_text("\n".join(lines) + "\n" + rest, encoding="utf-8")
    job = load_job(file)
    assert (job.job.nodes, job.job.ranks_per_node, job.slurm.partition, job.environment.profile) == (4, 8, "hpc", "azure-ndv5")


@pytest.mark.parametrize(("changes", "said"), [
    ({"sku": "Standard_ND128isr_NDR_GB200_v6", "nodes": 20}, "20 nodes are no multiple of 18"),
    ({"sku": "Standard_ND128isr_NDR_GB200_v6"}, "Azure publishes no image for Standard_ND128isr_NDR_GB200_v6"),
    ({"image": "mine:own:image:1"}, "mine:own:image:1 is not in the catalogue"),
    ({"sku": "Standard_NC96ads_A100_v4"}, "has no InfiniBand: a job on several nodes goes over Ethernet"),
    ({"sku": "Standard_ND40rs_v2"}, "has Python 3.10, and hpc-mp needs 3.11 or later"),
    ({"sku": "Standard_HB120rs_v2"}, "is retired on 2027-05-31"),
    ({"nodes": 16}, "/shared is one disk of the scheduler"),
    ({"accounting": True}, "wants a MySQL server that you have made"),
    ({}, "Quota is not capacity"),
])
def test_what_has_to_be_known_is_said_where_it_holds(changes: dict[str, Any], said: str) -> None:
    found = azure_summary(settle(replace(H100, **changes), CATALOGUE), CATALOGUE).notes
    assert any(said in note for note in found), found
    plain = azure_summary(settle(H100, CATALOGUE), CATALOGUE).notes
    assert any(said in note for note in plain) == (not changes)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "words"), [
    ({"sku": "Standard_ND96isr_H100"}, ("is no size", "did you mean 'Standard_ND96isr_H100_v5'")),
    ({"sku": "x9"}, ("is no size", "for training there are", "Standard_ND96isr_H200_v5")),
    ({"sku": "p5.48xlarge"}, ("another cloud", "name a size of Azure")),
    ({"nodes": 0}, ("--nodes 0", "must be at least 1")),
    ({"nodes": 101}, ("one placement group holds 100", "share no InfiniBand", "--nodes 100 or less")),
    ({"sku": "Standard_HB176rs_v4", "nodes": 301}, ("holds 300",)),
    ({"sku": "Standard_D8ads_v5", "nodes": 1001}, ("at most 1000",)),
    ({"sku": "Standard_ND96is_H100_v5", "nodes": 2}, ("has no InfiniBand", "take Standard_ND96isr_H100_v5")),
    ({"image": "microsoft-dsvm:ubuntu-hpc:2404-rocm:latest"},
     ("has the drivers rocm", "take microsoft-dsvm:ubuntu-hpc:2404:latest")),
    ({"image": "microsoft-dsvm:ubuntu-hpc:2204-v100:latest"}, ("has the drivers nvidia-v100",)),
    ({"image": "Canonical:ubuntu-24_04-lts:server-arm64:latest"}, ("is for arm64",)),
    ({"image": "Canonical:ubuntu-24_04-lts:server:latest"}, ("has no drivers",)),
    ({"image": "almalinux:almalinux-hpc:8_10-hpc-gen1:latest"}, ("is of generation 1",)),
    ({"image": "microsoft-dsvm:ubuntu-hpc:2004:latest"}, ("ended on 2025-05-31",)),
    ({"image": "azure-hpc:azurelinux-hpc:3:latest"}, ("has no packages of Slurm",)),
    ({"sku": "Standard_HB176rs_v4", "image": "Canonical:ubuntu-24_04-lts:server:latest"}, ("no drivers of InfiniBand",)),
    ({"sku": "Standard_ND128isr_GB300_v6", "image": "microsoft-dsvm:ubuntu-hpc:2404:latest"}, ("is for x86_64", "arm64")),
    ({"region": "West Europe"}, ("--region West Europe", "such as westeurope")),
    ({"subnet": "subnet"}, ("--subnet subnet", "RESOURCEGROUP/NETWORK/SUBNET")),
    ({"name": "my cluster"}, ("--name my cluster", "letters, digits and -")),
    ({"storage_address": "10.0.0.9"}, ("--storage-address", "--storage external")),
    ({"database": "mysql://db"}, ("--database mysql://db", "without mysql://")),
    ({"database": "db"}, ("--no-accounting",)),
    ({"login_nodes": -1}, ("--login-nodes -1", "0 to 20")),
    ({"htc_nodes": 2000}, ("--htc-nodes 2000",)),
])
def test_what_cannot_be_is_refused_with_its_rule_and_its_remedy(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(HpcMpError) as refused:
        settle(replace(H100, **changes), CATALOGUE)
    assert [word for word in words if word.casefold() not in str(refused.value).casefold()] == []


def test_the_most_that_is_allowed_is_allowed() -> None:
    for sku, nodes in (("ND96isr_H100_v5", 100), ("Standard_HB176rs_v4", 300), ("standard_d8ads_v5", 1000)):
        assert settle(replace(H100, sku=sku, nodes=nodes), CATALOGUE).choices.nodes == nodes
