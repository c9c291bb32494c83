"""``hpc-mp init``: what it writes loads, fits what was found, and nothing is overwritten."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from launching import answers, executable, silent
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.cluster.node.nvidia_smi import Gpu
from hpc_mp.cluster.slurm.limits import Association, JobTerms, PartitionAccess, Qos, partition_access, qualities, terms
from hpc_mp.cluster.slurm.query import NodeKind, SlurmPartition
from hpc_mp.cluster.slurm.site import SlurmSite, ThisMachine
from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.inputs import find_files
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.launch.first_job import job_text
from hpc_mp.launch.render import render

GIB = 2**30
LAPTOP = ThisMachine(2, 8 * GIB, ())


def site(gpus: tuple[tuple[str | None, int], ...] = (("h100", 8),), nodes: int = 4, limit: str | None = None,
         accounts: tuple[str, ...] = ("proj",), qos: str | None = None, per_user: Mapping[str, int] | None = None) -> SlurmSite:
    kind = NodeKind(tuple(f"g{n}" for n in range(nodes)), 128, 1000 * GIB, gpus)
    partition = SlurmPartition("gpu", True, True, limit, (kind,))
    terms = JobTerms(next(iter(accounts), None), qos, Qos("q", None, per_user or {}), limit)
    return SlurmSite((23, 11), (partition,), partition, kind, 126, accounts, terms)


def load(tmp_path: Path, machine: ThisMachine, found: SlurmSite | None = None) -> JobSpec:
    path = tmp_path / "job.toml"
    path.write_text(job_text(machine, found), encoding="utf-8")
    return load_job(path)


def layout(spec: JobSpec) -> tuple[int, int, int, int, int]:
    return spec.job.nodes, spec.job.ranks_per_node, spec.parallel.tensor, spec.parallel.pipeline, spec.data_degree


@pytest.mark.parametrize(("cores", "gib", "gpus", "gib_each", "expected"), table(__file__, "init.toml", "machines"))
def test_without_slurm(tmp_path: Path, cores: int, gib: int, gpus: list[str], gib_each: int | None, expected: list[int]) -> None:
    memory = gib_each and gib_each * GIB
    spec = load(tmp_path, ThisMachine(cores, gib * GIB, tuple(Gpu(index, name, memory) for index, name in enumerate(gpus))))
    assert [*layout(spec)] == expected and find_files(spec.data.files)
    assert (spec.job.device, spec.slurm.partition) == ("auto", None)


@pytest.mark.parametrize(("changes", "expected"), table(__file__, "init.toml", "sites"))
def test_with_slurm(tmp_path: Path, changes: dict[str, Any], expected: list[int]) -> None:
    found = site(**changes)
    spec = load(tmp_path, LAPTOP, found)
    assert [*layout(spec)] == expected
    assert spec.slurm.partition == "gpu"
    assert spec.slurm.account == "proj"
    render(spec, tmp_path, ClusterFacts(found.version), python="/usr/bin/python3")


def test_a_gpu_brings_its_share_of_the_node(tmp_path: Path) -> None:
    spec = load(tmp_path, LAPTOP, site())
    assert spec.slurm.gpu_type == "h100"
    assert spec.slurm.extra == {"cpus-per-task": 15, "mem": "0"}
    assert "#SBATCH --gpus-per-node=h100:8\n" in render(spec, tmp_path, python="/usr/bin/python3").text
    spec = load(tmp_path, LAPTOP, site(gpus=(), accounts=()))  # nodes without GPUs are shared
    assert (spec.job.device, spec.slurm.gpu_type, spec.slurm.account) == ("cpu", None, None)
    assert spec.slurm.extra == {"mem-per-cpu": "2048M"}


def test_the_time_limit_keeps_to_the_partitions(tmp_path: Path) -> None:
    limits = {None: "00:30:00", "1-00:00:00": "00:30:00", "2:00:00": "00:30:00", "30:00": "00:30:00", "10:00": "10:00"}
    assert {limit: load(tmp_path, LAPTOP, site(limit=limit)).job.time_limit for limit in limits} == limits


def test_the_small_model_is_small_and_names_are_quoted(tmp_path: Path) -> None:
    small, large = load(tmp_path, LAPTOP), load(tmp_path, replace(LAPTOP, gpus=(Gpu(0, "H200", 141 * GIB),)))
    assert small.model.config["n_embd"] < large.model.config["n_embd"] and small.train.steps == 20  # type: ignore[index]
    name = 'a "b" \\ # ü'
    found = site()
    slurm = load(tmp_path, LAPTOP, replace(found, chosen=replace(found.chosen, name=name), terms=JobTerms(name, name))).slurm
    assert slurm.partition == slurm.account == slurm.qos == name


def test_every_section_is_commented() -> None:
    for found in (None, site()):
        sections = re.split(r"^\[", job_text(LAPTOP, found), flags=re.MULTILINE)[1:]
        assert [section.partition("]")[0] for section in sections] == [
            "job", "model.config", "data", "parallel", "train", "checkpoint", "slurm", "environment"]
        assert all("\n# " in section for section in sections)


# --- accounts and qualities of service ------------------------------------------------------------------------------

MINE = (Association("a", None, ("long", "short"), "short", None), Association("b", None, ("normal",), None, "2:00:00"))
KNOWN = {"short": Qos("short", "00:10:00", {"gres/gpu": 4}, 2), "long": Qos("long"), "normal": Qos("normal")}


@pytest.mark.parametrize(("partition_access", "expected"), [
    (PartitionAccess(), JobTerms("a", None, KNOWN["short"], "00:10:00")),
    (PartitionAccess(qos=frozenset({"long"})), JobTerms("a", "long", KNOWN["long"], "1:00:00")),
    (PartitionAccess(no_qos=frozenset({"short"})), JobTerms("a", "long", KNOWN["long"], "1:00:00")),
    (PartitionAccess(accounts=frozenset({"b"})), JobTerms("b", None, KNOWN["normal"], "1:00:00")),
    (PartitionAccess(no_accounts=frozenset({"a"})), JobTerms("b", None, KNOWN["normal"], "1:00:00")),
    (PartitionAccess(accounts=frozenset({"c"})), JobTerms("a", None, KNOWN["short"], "00:10:00")),  # none serves: the default
])
def test_the_first_account_and_qos_that_the_partition_takes(partition_access: PartitionAccess, expected: JobTerms) -> None:
    assert terms("p", "1:00:00", ("a", "b"), MINE, KNOWN, partition_access) == expected


def test_the_shortest_limit_counts_days_and_hours() -> None:
    held = (Association("a", "p", ("long",), "long", "1-12"),)
    assert terms("p", "1-06:00:00", ("a",), held, KNOWN, PartitionAccess()).max_wall == "1-06:00:00"


def test_an_association_with_the_partition_goes_before() -> None:
    special = (*MINE, Association("a", "p", ("long",), "long", "30:00"))
    assert terms("p", None, ("a",), special, KNOWN, PartitionAccess()) == JobTerms("a", None, KNOWN["long"], "30:00")
    assert terms("q", None, ("a",), special, KNOWN, PartitionAccess()).quality == KNOWN["short"]
    assert terms("p", "10:00", (), (), {}, PartitionAccess()) == JobTerms(None, None, None, "10:00"), "without accounts"


def test_what_slurm_says_of_limits() -> None:
    said = answers({"sacctmgr": "normal||||\nshort|00:10:00|cpu=8,gres/gpu=4|2\n",
                    "scontrol": "PartitionName=gpu AllowGroups=ALL AllowAccounts=A,b AllowQos=ALL DenyQos=low QoS=N/A"})
    assert qualities(said)["short"] == Qos("short", "00:10:00", {"cpu": 8, "gres/gpu": 4}, 2)
    found = partition_access("gpu", said)
    assert found.takes_account("a") and not found.takes_account("c")
    assert found.takes_qos("normal") and not found.takes_qos("low")
    assert (qualities(silent), partition_access("gpu", silent)) == ({}, PartitionAccess())


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory on a machine whose Slurm does not answer."""
    executable(tmp_path / "bin", "scontrol", "echo 'Slurmctld(primary) at ctl is DOWN'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def init(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["init", *arguments])


def test_init_writes_a_job_file_and_says_what_it_found(here: Path) -> None:
    result = init()
    assert result.exit_code == 0, result.output
    assert "none: Slurmctld(primary) at ctl is DOWN" in result.output
    assert re.search(r"this machine +\d+ cores, [\d.,]+ GiB", result.output)
    assert "hpc-mp launch job.toml" in result.output
    assert load_job(here / "job.toml").job.name == "first"
    assert "hpc-mp launch 'my job.toml'" in init("my job.toml").output, "the command that follows can be pasted"


def test_a_file_is_not_overwritten_unless_told(here: Path) -> None:
    (here / "job.toml").write_text("mine")
    for words, rule in (((), "exists"), (("no/such/job.toml",), "cannot be written")):
        refused = init(*words).exception
        assert isinstance(refused, HpcMpError) and rule in refused.rule
    assert (here / "job.toml").read_text() == "mine"
    assert init("--force").exit_code == 0 and load_job(here / "job.toml")


SLURM = Path(__file__).with_name("init_slurm.sh").read_text()


def test_init_on_a_cluster(here: Path) -> None:
    for name in ("scontrol", "sinfo", "sacctmgr"):
        executable(here.parent / "bin", name, SLURM)
    result = init("job.toml")
    assert result.exit_code == 0, result.output
    assert "Slurm         24.11, account lab\n" in result.output
    assert "gpu (default) ← used: 6 nodes with 32 CPUs, 4 × l40s" in result.output
    assert "cpu (down): 9 nodes with 64 CPUs\n" in result.output
    spec = load_job(here / "job.toml")
    assert (spec.slurm.partition, spec.slurm.account, spec.slurm.gpu_type) == ("gpu", "lab", "l40s")
    assert spec.slurm.extra == {"cpus-per-task": 7, "mem": "0"}


# --- a planned job ----------------------------------------------------------------------------------------------------

MODEL = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192}


def test_a_model_gets_the_job_file_of_its_best_plan(here: Path) -> None:
    for name in ("scontrol", "sinfo", "sacctmgr"):
        executable(here.parent / "bin", name, SLURM.replace("l40s", "h100"))
    (here / "config.json").write_text(json.dumps(MODEL))
    result = init("job.toml", "--model", "config.json", "--nodes", "2", "--machine", "p5")
    assert result.exit_code == 0, result.output
    assert "set data.files and train.steps, start it with" in result.output
    spec = load_job(here / "job.toml")
    assert (spec.slurm.partition, spec.slurm.account, spec.slurm.gpu_type) == ("gpu", "lab", "h100")
    assert (spec.job.nodes, spec.job.ranks_per_node, spec.model.config["num_hidden_layers"]) == (2, 8, 32)  # type: ignore[index]
    same = ["--model", "config.json", "--nodes", "2", "--machine", "p5", "--write", "same.toml"]
    planned = CliRunner().invoke(cli, ["plan", *same])
    assert planned.exit_code == 0 and load_job(here / "same.toml").parallel == spec.parallel
    refused = init("job.toml", "--model", "config.json", "--nodes", "2", "--machine", "p5").exception
    assert isinstance(refused, HpcMpError) and refused.rule == "exists"
    assert init("job.toml", "--model", "config.json", "--nodes", "1", "--force").exit_code == 0, "the machine of the partition"
    assert (load_job(here / "job.toml").job.nodes, load_job(here / "job.toml").job.ranks_per_node) == (1, 4), "4 GPUs on a node"


def test_a_model_without_a_known_machine_is_refused(here: Path) -> None:
    (here / "config.json").write_text(json.dumps(MODEL))
    refused = init("job.toml", "--model", "config.json").exception
    assert isinstance(refused, HpcMpError) and "nothing names their model" in refused.rule and not (here / "job.toml").exists()
