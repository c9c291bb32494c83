"""``hpc-mp cloud render``: machines with sources, configurations of AWS and Google Cloud, what is refused."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from other_clouds import (
    AWS,
    FORMS,
    GCP,
    GOLDEN,
    KEYS,
    RECORDED,
    VARIABLES,
    configuration,
    golden,
    unknown_keys,
    unknown_settings,
    wish,
)

from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.catalogue import MachineType, catalogue
from hpc_mp.cli.cloud import command
from hpc_mp.clouds import render, summarise, write
from hpc_mp.clouds.azure.offer import load_offer
from hpc_mp.clouds.request import gres
from hpc_mp.environment.profiles import profile_names
from hpc_mp.job import resolve
from hpc_mp.planner.fabrics import fabric

OTHERS = list(catalogue().of("aws", "gcp"))
AWS_FORMS = [name for name in FORMS if wish(name).size.cloud == "aws"]
GCP_FORMS = [name for name in FORMS if wish(name).size.cloud == "gcp"]
DENIED = {  # aws-parallelcluster 3.16.1, slurm_settings_validator.py
    "epilog", "grestypes", "launchparameters", "prolog", "reconfigflags", "resumefailprogram", "resumeprogram", "resumetimeout",
    "slurmctldhost", "slurmctldlogfile", "slurmctldparameters", "slurmdlogfile", "slurmuser", "suspendexcnodes", "suspendprogram",
    "suspendtime", "taskplugin", "treewidth"}


def read(name: str) -> Any:
    return yaml.safe_load(configuration(render(wish(name))))


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(command, ["render", *arguments])
    return done.exit_code, done.stdout, str(done.exception or "")


def given(options: dict[str, str]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", value)]


# --- the catalogue ---------------------------------------------------------------------------------------------------


def test_the_linter_of_azures_templates_sees_azures_sizes_alone() -> None:
    assert {size.cloud for size in load_offer().sizes.values()} == {"azure"}
    assert load_offer().size("p5.48xlarge") is None and catalogue().machine("P5.48xlarge") is not None
    assert {(size.cloud, bool(size.gpus)) for size in OTHERS} == {("aws", True), ("aws", False), ("gcp", True), ("gcp", False)}


@pytest.mark.parametrize("size", OTHERS, ids=lambda size: size.name)
def test_the_figures_of_a_machine_fit_each_other(size: MachineType) -> None:
    assert len({bool(each) for each in (size.gpus, size.gpu, gres(size), size.nics, size.rdma, size.rdma_gbps)}) == 1
    assert not size.gpus or gres(size) in (f"gpu:{size.gpus}", f"gpu:{size.gpu_title.split()[0].lower()}:{size.gpus}")
    assert size.profile in profile_names() and (not size.fabric or fabric(size.fabric).gpus == size.gpus)
    if size.fabric:
        assert fabric(size.fabric).nics * fabric(size.fabric).nic * 8 == pytest.approx(size.nics * size.rdma_gbps)


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_rendered_files_are_the_golden_ones(name: str) -> None:
    files = render(wish(name))
    for file, path in golden(name).items():
        assert files[file] == path.read_text(encoding="utf-8"), f"{path}: python tests/clouds/other_clouds.py writes it anew"


def test_there_is_a_golden_file_of_the_recorded_forms_and_of_no_other() -> None:
    assert {path.name for path in GOLDEN.iterdir() if path.is_dir()} == set(RECORDED)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_its_scripts_its_machine_and_its_steps(name: str) -> None:
    files, made = render(wish(name)), wish(name)
    found = summarise(made)
    assert made.size.name in configuration(files)
    steps = files["NEXT-STEPS.md"]
    assert all(word in steps for word in (made.name, *(str(quota.needed) for quota in found.quotas), *found.job.splitlines()))
    scripts = asset(f"cyclecloud/other-clouds/{wish(name).size.cloud}")
    assert all(text == (scripts / file).read_text(encoding="utf-8") for file, text in files.items() if file.endswith(".sh"))


@pytest.mark.parametrize("name", AWS_FORMS)
def test_parallelcluster_knows_every_key_and_denies_no_setting(name: str) -> None:
    config, known = read(name), json.loads(KEYS.read_text(encoding="utf-8"))
    assert list(unknown_keys(config, known)) == []
    assert DENIED.isdisjoint(key.lower() for each in config["Scheduling"]["SlurmSettings"]["CustomSlurmSettings"] for key in each)

    spoilt = copy.deepcopy(config)
    spoilt["Scheduling"]["SlurmQueues"][0]["ComputeResources"][0]["MinCuont"] = 4
    spoilt["HeadNode"]["CustomActions"]["OnNodeConfigured"]["Skript"] = "s3://x"
    assert list(unknown_keys(spoilt, known)) == ["HeadNode.CustomActions.OnNodeConfigured.Skript",
                                                 "Scheduling.SlurmQueues.ComputeResources.MinCuont"]


@pytest.mark.parametrize("name", GCP_FORMS)
def test_cluster_toolkits_modules_have_every_setting(name: str) -> None:
    blueprint, variables = read(name), json.loads(VARIABLES.read_text(encoding="utf-8"))
    assert list(unknown_settings(blueprint, variables)) == []

    modules = blueprint["deployment_groups"][-1]["modules"]
    modules[0]["settings"]["runers"] = []
    modules[1]["use"] = ["nowhere"]
    modules[-1]["source"] = "community/modules/scheduler/schedmd-slurm-gcp-v7-controller"
    spoilt = list(unknown_settings(blueprint, variables))
    assert spoilt == ["compute-startup: runers", "nodeset uses nowhere", modules[-1]["source"]]


@pytest.mark.parametrize("name", AWS_FORMS)
def test_an_aws_queue_is_static_close_together_and_on_efa(name: str) -> None:
    config, made = read(name), wish(name)
    (queue,) = config["Scheduling"]["SlurmQueues"]
    (resource,) = queue["ComputeResources"]
    assert (resource["InstanceType"], resource["MinCount"], resource["MaxCount"]) == (made.size.name, made.nodes, made.nodes)
    assert resource.get("Efa") == ({"Enabled": True} if made.size.nics else None)
    assert queue["Networking"]["PlacementGroup"]["Enabled"] is made.placement
    assert queue.get("CapacityReservationTarget", {}).get("CapacityReservationId") == made.options.get("reservation")
    assert queue["CapacityType"] == {"on-demand": "ONDEMAND", "spot": "SPOT", "block": "CAPACITY_BLOCK"}[made.capacity]
    assert config["HeadNode"]["Networking"]["SubnetId"] == AWS["head-subnet"]
    assert queue["Networking"]["SubnetIds"] == [AWS["subnet"]]
    assert [each["MountDir"] for each in config["SharedStorage"]] == ["/shared", *(["/fsx"] if made.size.gpus else [])]
    settings = config["Scheduling"]["SlurmSettings"]["CustomSlurmSettings"]
    assert {"HealthCheckProgram": "/usr/local/libexec/hpc-mp-health"} in settings


def test_placement_follows_nodes_network_and_reservation() -> None:
    close = {name: wish(name).placement for name in FORMS}
    assert [name for name, together in close.items() if not together] == [
        "c6i.xlarge", "n2-standard-4", "p5-block", "p5-reserved", "p5-single", "a3-reserved", "a4-flex"]


@pytest.mark.parametrize("name", GCP_FORMS)
def test_a_gcp_nodeset_has_its_networks_and_the_controller_the_wheel(name: str) -> None:
    blueprint, made = read(name), wish(name)
    modules = {module["id"]: module for group in blueprint["deployment_groups"] for module in group["modules"]}
    settings = modules["nodeset"]["settings"]
    assert (settings["machine_type"], settings["node_count_static"]) == (made.size.name, made.nodes)
    assert settings["enable_placement"] is made.placement and settings["reservation_name"] == made.options.get("reservation", "")
    assert settings["dws_flex"]["enabled"] is (made.capacity == "flex")
    assert ("rdma-net" in modules) == ("image" in modules) == bool(made.size.nics) == ("build-image.sh" in render(made))
    if made.size.nics:
        assert modules["rdma-net"]["settings"]["subnetworks_template"]["count"] == made.size.nics
        conf = settings["node_conf"]
        assert conf["SocketsPerBoard"] * conf["CoresPerSocket"] * conf["ThreadsPerCore"] == made.size.vcpus
    staged = [runner["source"] for module in modules.values() for runner in module.get("settings", {}).get("runners", [])]
    assert all(source.startswith('$(ghpc_stage("') for source in staged)
    names = {source.split('"')[1] for source in staged}
    assert {name for name in names if name.endswith(".sh")} == {name for name in render(made) if name.endswith(".sh")}
    assert sum(name.endswith(".whl") for name in names) == 1
    backend = blueprint.get("terraform_backend_defaults", {"configuration": {}})
    assert backend["configuration"].get("bucket") == made.options.get("state-bucket")


@pytest.mark.parametrize("region, arn", [("us-east-1", "aws"), ("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn")])
def test_policies_are_those_of_the_regions_partition(region: str, arn: str, tmp_path: Path) -> None:
    options = given(AWS | {"region": region})
    code, _, error = run("--sku", "c6i.xlarge", "--nodes", "2", *options, "--output", str(tmp_path / "new"))
    assert code == 0, error
    assert f"arn:{arn}:iam::aws:policy/" in (tmp_path / "new" / "cluster-config.yaml").read_text(encoding="utf-8")


def test_scripts_please_shellcheck() -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    scripts = sorted(asset("cyclecloud/other-clouds").rglob("*.sh"))
    assert len(scripts) == 5
    found = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout
    assert all("\nset -euo pipefail\n" in script.read_text(encoding="utf-8") for script in scripts)


def test_no_script_makes_a_limit_that_the_doctor_warns_of() -> None:
    for script in asset("cyclecloud").rglob("*.sh"):
        assert "- stack" not in script.read_text(encoding="utf-8"), script


# --- what a job will see ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_the_lines_for_a_job_file_are_a_job_files(name: str, tmp_path: Path) -> None:
    found = summarise(wish(name))
    rest = '[model]\nconfig = { model_type = "gpt2", n_layer = 8 }\n[data]\nfiles = ["x.txt"]\nsequence_length = 128\n[train]\n'
    spec = resolve(tomllib.loads(f"{found.job}{rest}steps = 1\nglobal_batch = {32 * found.nodes}\n"), tmp_path)
    assert (spec.job.nodes, spec.slurm.partition, spec.environment.profile) == (found.nodes, found.partition, found.profile)
    assert spec.job.ranks_per_node == (found.gpus or spec.job.ranks_per_node)


def test_json_says_what_a_job_will_see(tmp_path: Path) -> None:
    code, out, error = run("--sku", "P5.48XLARGE", "--nodes", "4", *given(AWS), "--output", str(tmp_path / "a b"), "--json")
    assert code == 0, error
    found = json.loads(out)
    assert found["directory"] == str(tmp_path / "a b")
    assert found["files"] == ["NEXT-STEPS.md", "cluster-config.yaml", "compute-node.sh", "head-node.sh"]
    assert sorted(path.name for path in (tmp_path / "a b").iterdir()) == found["files"]
    assert (found["gpus"], found["gres"], found["adapters"], found["network"]) == (8, "gpu:h100:8", 32, "EFA")
    assert (found["profile"], found["busbw_pair"], found["node_names"]) == ("aws-efa", 443, "gpu-st-p5-[1-4]")
    (quota,) = found["quotas"]
    assert (quota["code"], quota["needed"], quota["unit"]) == ("L-417A185B", 768, "vcpus")


def test_text_says_it_too_and_that_a_quota_is_not_capacity(tmp_path: Path) -> None:
    code, out, error = run("--sku", "a3-ultragpu-8g", "--nodes", "2", *given(GCP), "--output", str(tmp_path / "new"))
    assert code == 0, error
    for words in ("8 × H200 141GB per node, GRES gpu:8", "8 × RoCE of 400 Gb/s", "16 GPUs", "a permission, not capacity",
                  "gcp-a3-ultra", "250 GB/s between two", "NEXT-STEPS.md"):
        assert words in out


def test_a_capacity_block_needs_no_quota_of_vcpus() -> None:
    assert summarise(wish("p5-block")).quotas == ()
    assert [quota.name for quota in summarise(wish("p5-single")).quotas] == ["All P5 Spot Instance Requests"]


def test_a_quota_without_a_known_name_is_stated_in_numbers(tmp_path: Path) -> None:
    code, out, error = run("--sku", "p6-b200.48xlarge", "--nodes", "3", "--capacity", "spot", *given(AWS),
                         "--output", str(tmp_path / "new"))
    assert code == 0, error
    steps = (tmp_path / "new" / "NEXT-STEPS.md").read_text(encoding="utf-8")
    assert "576 vCPUs and 24 GPUs; the catalogue names no quota for spot capacity" in out
    assert "**576 vCPUs and 24 GPUs**" in steps and "the reservation  is" not in steps and "for a Capacity Block" not in steps
    (quota,) = summarise(wish("a4-flex")).quotas
    assert (quota.needed, quota.unit, quota.name) == (8, "gpus", "PREEMPTIBLE-NVIDIA-B200-GPUS-per-project-region")


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, words", [
    (("--sku", "p5.48large", "--nodes", "2"), "did you mean 'p5.48xlarge'?"),
    (("--sku", "standard_nd96isr_h100_v6", "--nodes", "2"), "no size in the catalogue. Did you mean 'Standard_ND96isr_H100_v5'"),
    (("--sku", "a3-megagpu-8g", "--nodes", "2"), "examples/machine-learning/a3-megagpu-8g"),
    (("--sku", "zzz", "--nodes", "2"), "Here are p4d.24xlarge"),
    (("--sku", "p5.48xlarge", "--nodes", "0", *given(AWS)), "--nodes 0: must be at least 1"),
    (("--sku", "p5.48xlarge", "--nodes", "2"), "--region, --subnet, --bucket: missing, and AWS needs them. Give a region"),
    (("--sku", "p5.48xlarge", "--nodes", "2", *given(AWS | {"subnet": "subnet-1"})), "--subnet subnet-1: is not well formed"),
    (("--sku", "p5.48xlarge", "--nodes", "2", *given(AWS | {"region": "us-central1"})), "us-central1: is not well formed"),
    (("--sku", "p5.48xlarge", "--nodes", "2", *given(AWS | {"bucket": "My_Bucket"})), "--bucket My_Bucket: is not well formed"),
    (("--sku", "p5.48xlarge", "--nodes", "2", *given(AWS | {"zone": "us-east-1a"})), "--zone us-east-1a: means nothing on AWS"),
    (("--sku", "a4-highgpu-8g", "--nodes", "2", *given(GCP | {"subnet": AWS["subnet"]})), "means nothing on Google Cloud"),
    (("--sku", "a4-highgpu-8g", "--nodes", "2", *given(GCP | {"zone": "us-east4-a"})), "is not in the region us-central1"),
    (("--sku", "p5.48xlarge", "--nodes", "2", "--capacity", "block", *given(AWS)), "give it with --reservation cr-…"),
    (("--sku", "p5.48xlarge", "--nodes", "2", "--capacity", "flex", *given(AWS)), "does not exist on AWS"),
    (("--sku", "a4-highgpu-8g", "--nodes", "2", "--capacity", "block", *given(GCP)), "does not exist on Google Cloud"),
    (("--sku", "p5.48xlarge", "--nodes", "2", "--capacity", "spot", *given(AWS | {"reservation": "cr-0123456789abcdef0"})),
     "does not go with a reservation"),
    (("--sku", "p5.48xlarge", "--nodes", "2", "--scratch-gib", "5000", *given(AWS)), "say --scratch-gib 4800"),
    (("--sku", "a4-highgpu-8g", "--nodes", "2", "--scratch-gib", "1200", *given(GCP)), "say --scratch-gib 18000"),
    (("--sku", "a4-highgpu-8g", "--nodes", "2", "--name", "My cluster", *given(GCP)), "--name My cluster: is not well formed"),
    (("--sku", "p5.48xlarge", "--nodes", "2", "--partition", "a: b", *given(AWS)), "--partition a: b: is not well formed"),
])
def test_refusals_name_value_rule_and_remedy_and_write_nothing(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    code, out, error = run(*arguments, "--output", str(tmp_path / "new"))
    assert code != 0 and not out and words.lower() in error.lower(), error
    assert not (tmp_path / "new").exists()


def test_a_directory_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    code, _, error = run("--sku", "c6i.xlarge", "--nodes", "1", *given(AWS), "--output", str(tmp_path / "there"))
    assert code != 0 and "exists" in error and list((tmp_path / "there").iterdir()) == []
    (tmp_path / "file").write_text("mine")
    code, _, error = run("--sku", "c6i.xlarge", "--nodes", "1", *given(AWS), "--output", str(tmp_path / "file" / "below"))
    assert code != 0 and "cannot be written" in error and (tmp_path / "file").read_text() == "mine"


def test_what_fails_half_way_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match="cannot be written"):
        write(tmp_path / "new", {"one": "1", "no/such/folder": "2"})
    assert not (tmp_path / "new").exists()


def test_names_that_yaml_reads_as_something_else_stay_names(tmp_path: Path) -> None:
    code, _, error = run("--sku", "n2-standard-4", "--nodes", "1", "--name", "on", "--partition", "no", *given(GCP),
                         "--output", str(tmp_path / "new"))
    assert code == 0, error
    blueprint = yaml.safe_load((tmp_path / "new" / "blueprint.yaml").read_text(encoding="utf-8"))
    assert blueprint["vars"]["deployment_name"] == "on"
