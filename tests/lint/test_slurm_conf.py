"""``hpc-mp cluster describe``: recorded answers of two releases, every rule seen to find and not to find, a real Slurm."""

import json
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from measured import leaves, measure
from slurm_lab.lab import Lab

from hpc_mp.base.command import CommandFailed
from hpc_mp.cli import cluster
from hpc_mp.cli.cluster import command
from hpc_mp.cluster.slurm.records import read_config, read_records
from hpc_mp.cluster.topology import read_topologies
from hpc_mp.lint.slurm_conf.config import SlurmFacts, ask_slurm
from hpc_mp.lint.slurm_conf.files import lint_slurm_conf
from hpc_mp.lint.slurm_conf.report import RULES, describe
from hpc_mp.lint.slurm_conf.rules_site import GRACE_S

ANSWERS = Path(__file__).parents[1] / "golden" / "cluster"
TREE = "SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]\nSwitchName=spine Switches=s[1-2]\n"


def recorded(release: str) -> SlurmFacts:
    texts = {kind: (ANSWERS / f"{release}.{kind}").read_text(encoding="utf-8") for kind in ("config", "partition", "node")}
    return SlurmFacts(read_config(texts["config"]).config, None, read_records(texts["partition"]), read_records(texts["node"]),
                read_topologies(TREE))


def codes(told: SlurmFacts) -> set[str]:
    return {finding.code for finding in describe(told).findings}


# --- what scontrol prints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["22.05", "24.11"])
def test_recorded_answers_are_read(release: str) -> None:
    told = recorded(release)
    assert told.release == tuple(map(int, release.split(".")))
    assert told.says("TopologyPlugin") == "topology/tree" and told.seconds("KillWait") == 5
    assert told.says("HealthCheckProgram") == "" and "PMIxTimeout" not in told.config, "sections are kept apart"
    assert (told.nodes[0]["NodeName"], told.nodes[0]["Gres"], told.nodes[0]["State"]) == ("n1", "gpu:2", "IDLE")
    assert told.nodes[0]["OS"] == "Linux 6.1.0-30-amd64 #1 SMP", "values may hold blanks"
    assert told.partitions[0]["PartitionName"] == "all" and told.partitions[0]["Default"] == "YES"
    found = describe(told)
    (partition,) = found.partitions
    (group,) = partition["groups"]
    assert (group["nodes"], group["cpus"], group["gpus"]) == (len(told.nodes), 4, ((None, 2),))
    assert group["states"] == {"IDLE": len(told.nodes)}


@pytest.mark.parametrize("release", ["22.05", "24.11"])
def test_what_is_wrong_with_the_recorded_cluster(release: str) -> None:
    told = recorded(release)
    assert codes(told) == {
        "accounting-off", "health-none", "task-plugin", "proctrack", "memlock", "kill-wait", "return-to-service",
        *(["topology-outside"] if len(told.nodes) > 4 else [])}


def test_cgroups_have_a_section_of_their_own() -> None:
    text = ("KillWait = 30 sec\n\nCgroup Support Configuration:\nCgroupPlugin = cgroup/v2\nConstrainCores = yes\n\n"
            "MPI Plugins:\nX = 1\n")
    settings = read_config(text)
    assert settings.config == {"KillWait": "30 sec"}
    assert settings.sections["Cgroup Support Configuration"] == {"CgroupPlugin": "cgroup/v2", "ConstrainCores": "yes"}


def test_networks_are_what_features_and_gres_say() -> None:
    told = recorded("22.05")
    assert describe(told).networks == () and describe(told).platform is None
    nodes = tuple({**node, "AvailableFeatures": "h100,ib_ndr400,nvme", "Gres": "gpu:h100:8,nic:mlx5:8"} for node in told.nodes)
    found = describe(replace(told, nodes=nodes, measured=replace(measure(leaves(2, 2)), platform="azure-ndv5")))
    assert found.networks == ("ib_ndr400", "nic:mlx5:8") and found.platform == "azure-ndv5"


# --- rules -----------------------------------------------------------------------------------------------------------

BASE = recorded("22.05")
RIGHT = replace(
    BASE,
    config={
        **BASE.config, "TaskPlugin": "task/cgroup,task/affinity", "ProctrackType": "proctrack/cgroup", "KillWait": "120 sec",
        "PropagateResourceLimits": "", "PropagateResourceLimitsExcept": "MEMLOCK", "ReturnToService": "1",
        "PrologFlags": "Alloc,Contain", "AccountingStorageType": "accounting_storage/slurmdbd", "HealthCheckInterval": "60 sec",
        "AccountingStorageTRES": "cpu,mem,gres/gpu", "HealthCheckProgram": "/opt/check", "Prolog": "/etc/slurm/prolog",
    },
    cgroup={"ConstrainCores": "yes", "ConstrainDevices": "yes", "ConstrainRAMSpace": "yes"},
    gres_conf="Name=gpu File=/dev/nvidia[0-1]\n",
    measured=measure(leaves(2, 2), 0.3))


def changed(**row: Any) -> dict[str, Any]:
    """Return the fields of RIGHT that a row of ``settings.toml`` changes."""
    fields = {key: row[key] for key in ("cgroup", "gres_conf") if key in row}
    if "config" in row:
        fields["config"] = {**RIGHT.config, **row["config"]}
    for key, records in (("nodes", RIGHT.nodes), ("partitions", RIGHT.partitions)):
        of_all, of_first = row.get(key, {}), row.get(f"first_{key}", {})
        if of_all or of_first:
            fields[key] = tuple(record | of_all | (of_first if number == 0 else {}) for number, record in enumerate(records))
    return fields


SETTINGS = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))
NO_TOPOLOGY = changed(config={"TopologyPlugin": "topology/none"}) | {"topologies": ()}
WRONG: dict[str, dict[str, Any]] = {code: changed(**row) for code, row in SETTINGS["wrong"].items()} | {
    "topology-none": NO_TOPOLOGY,
    "topology-unknown": NO_TOPOLOGY | {"measured": None},
    "topology-wrong": {"measured": measure([["n1", "n3"], ["n2", "n4"]], 0.3)},
    "topology-outside": {"topologies": read_topologies("SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n3\n"
                                                       "SwitchName=t Switches=s[1-2]\n")},
    "topology-apart": {"topologies": read_topologies(TREE.rpartition("SwitchName")[0])},
}
ALSO = {"gres-broken": {"nodes-out"}, "topology-outside": {"topology-wrong"}}


def test_every_rule_has_a_case_and_a_code_of_its_own() -> None:
    assert sorted(rule.code for rule in RULES) == sorted(WRONG)


def test_advice_names_the_time_that_ranks_need() -> None:
    texts = {rule.code: f"{rule.message} {rule.fix}" for rule in RULES}
    assert all(len(re.findall(rf"\b{GRACE_S}\b", texts[code])) == 2 for code in ("kill-wait", "grace-time"))


def test_a_cluster_that_is_set_up_rightly_or_of_which_slurm_says_nothing_gets_no_word() -> None:
    assert describe(RIGHT).findings == ()
    assert describe(SlurmFacts({})).findings == ()


@pytest.mark.parametrize("code", WRONG)
def test_every_rule_finds_what_it_is_for_and_nothing_else(code: str) -> None:
    assert codes(replace(RIGHT, **WRONG[code])) == {code} | ALSO.get(code, set())


@pytest.mark.parametrize("changes", [
    *(changed(**row) for row in SETTINGS["right"]), {"gres_conf": None}, {"cgroup": None}, {"measured": None},
    changed(config={"TopologyPlugin": "topology/flat"}) | {"measured": None}, {"nodes": (), "partitions": ()},
    {"topologies": None}, {"measured": measure(leaves(4))},
    {"topologies": read_topologies(f"{TREE}SwitchName=t2 Switches=s[1-2]\nSwitchName=t3 Switches=s2\n"), "measured": None}])
def test_what_is_right_in_another_way_gets_no_word(changes: dict[str, Any]) -> None:
    assert codes(replace(RIGHT, **changes)) == set()


@pytest.mark.parametrize("changes", [
    changed(partitions={"OverSubscribe": "YES:2"}), changed(first_partitions={"OverSubscribe": "EXCLUSIVE"}),
    changed(partitions={"ExclusiveUser": "YES"})])
def test_memory_is_shared_where_one_partition_shares_nodes(changes: dict[str, Any]) -> None:
    shared = {"partitions": (*RIGHT.partitions, {**RIGHT.partitions[0], "PartitionName": "second"})}
    wrong = replace(RIGHT, **changed(config={"SelectTypeParameters": "CR_CPU"}) | shared)
    assert codes(replace(wrong, partitions=(*changes["partitions"], wrong.partitions[-1]))) == {"memory-shared"}


@pytest.mark.parametrize(("default", "found"), [
    ("PartitionName=DEFAULT OverSubscribe=EXCLUSIVE\n", False), ("PartitionName=DEFAULT Shared=Exclusive\n", False), ("", True)])
def test_partitions_of_a_file_inherit_from_the_default_before_them(default: str, found: bool, tmp_path: Path) -> None:
    text = f"SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n{default}PartitionName=a Nodes=n1 Default=YES\n"
    assert ("memory-shared" in {finding.code for finding in lint_slurm_conf(text, tmp_path / "slurm.conf")}) == found


@pytest.mark.parametrize(("changes", "said"), [
    *((changes, "nodes-shared") for changes in (
        changed(config={"SelectTypeParameters": "CR_CORE_MEMORY,CR_LLN"}), changed(partitions={"LLN": "YES"}),
        changed(partitions={"OverSubscribe": "FORCE"}))),
    *((changed(first_nodes={"State": state}), "nodes-out") for state in (
        "DOWN+CLOUD+NOT_RESPONDING", "DOWN*", "IDLE+DRAIN", "MIXED+DRAIN", "IDLE+FAIL", "IDLE+INVALID_REG", "IDLE+NOT_RESPONDING",
        "DOWN+CLOUD+POWERED_DOWN"))])
def test_nodes_are_shared_and_take_no_jobs_in_several_ways(changes: dict[str, Any], said: str) -> None:
    assert codes(replace(RIGHT, **changes)) == {said}


@pytest.mark.parametrize(("conf", "code"), [("AutoDetect=nvml\n", 0), ("Name=gpu Count=2\n", 1)])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_error_is_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conf: str, code: int,
                                  options: list[str]) -> None:
    """Warnings are not: what is wrong depends on the site."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(cluster, "ask_slurm", lambda: ask_slurm(Answers(tmp_path)))
    (tmp_path / "gres.conf").write_text(conf)
    done = CliRunner().invoke(command, ["describe", *options])
    assert done.exit_code == code, done.output
    assert "kill-wait" in done.stdout and ("gres-file" in done.stdout) == bool(code)
    assert not options or json.loads(done.stdout)["findings"]


def test_every_finding_says_why_and_what_to_do() -> None:
    for rule in RULES:
        assert len(rule.message) > 15 and len(rule.fix) > 10 and re.fullmatch(r"[a-z-]+", rule.code)


# --- asking ----------------------------------------------------------------------------------------------------------


class Answers:
    """scontrol as recorded, from a configuration whose folder we know."""

    def __init__(self, folder: Path, refuse: Sequence[str] = ()) -> None:
        self.folder, self.refuse = folder, refuse

    def __call__(self, argv: Sequence[str]) -> str:
        if argv[2] in self.refuse:
            raise CommandFailed(f"scontrol: error: {argv[2]} is not for you")
        if argv[2] == "topology":
            return TREE
        text = (ANSWERS / f"22.05.{argv[2]}").read_text(encoding="utf-8")
        return re.sub(r"SLURM_CONF .*", f"SLURM_CONF = {self.folder}/slurm.conf", text)


def test_files_beside_slurm_conf_are_read_where_they_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    told = ask_slurm(Answers(tmp_path))
    assert (told.gres_conf, told.cgroup, told.measured, told.unseen) == (None, None, None, ())
    (tmp_path / "gres.conf").write_text("Name=gpu Count=2\n")
    (tmp_path / "cgroup.conf").write_text("# fences\nConstrainCores=yes # all\n")
    told = ask_slurm(Answers(tmp_path))
    assert told.cgroup == {"ConstrainCores": "yes"} and "gres-file" in codes(told)


def test_what_is_refused_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    told = ask_slurm(Answers(tmp_path, refuse=("node", "topology")))
    assert told.nodes == () and told.topologies is None
    assert [words.partition(":")[0] for words in describe(told).unseen] == ["nodes", "topology"]
    with pytest.raises(CommandFailed):
        ask_slurm(Answers(tmp_path, refuse=("config",)))


def test_a_real_slurm_is_described(lab: Lab) -> None:
    done = lab.run([sys.executable, "-m", "hpc_mp", "cluster", "describe", "--json"], timeout=60, check=True)
    document = json.loads(done.stdout)
    (partition,) = document["partitions"]
    assert partition["name"] == "all" and partition["default"]
    assert sum(group["nodes"] for group in partition["groups"]) == len(lab.nodes)
    assert document["switches"] == [2, 1] and document["settings"]["SelectType"] == "select/cons_tres"
    found = {finding["code"]: finding for finding in document["findings"]}
    assert {"return-to-service", "kill-wait", "health-none", "task-plugin"} <= found.keys() and "no-requeue" not in found
    assert found["return-to-service"]["subject"] == "ReturnToService=2"
    shown = lab.run([sys.executable, "-m", "hpc_mp", "cluster", "describe"], timeout=60, check=True).stdout
    assert "ReturnToService=2" in shown and "all*" in shown
