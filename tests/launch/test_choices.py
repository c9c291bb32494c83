"""What the cluster decides for a job, what it is asked, and jobs that no node of their partition could ever run."""

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import answers, executable, silent, write_job
from rendering import job
from tables import table

from hpc_mp.base.command import CommandFailed, TimedOut
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.jobs import SlurmJob
from hpc_mp.cluster.slurm.limits import PartitionLimits, partition_limits
from hpc_mp.cluster.slurm.query import NodeKind, SlurmPartition
from hpc_mp.job import JobSpec
from hpc_mp.launch.choices import MIG, slurm_gpus
from hpc_mp.launch.facts import ClusterFacts, ask_cluster
from hpc_mp.launch.fit import check_fit, never_starts, with_node_memory
from hpc_mp.launch.launch import LaunchRequest, plan_job
from hpc_mp.planner.device import Device

Gpus = tuple[tuple[str | None, int], ...]


def cluster(*kinds: Gpus, select: str | None = "select/cons_tres") -> ClusterFacts:
    nodes = tuple(NodeKind((f"n{number}",), 64, 2**38, gpus) for number, gpus in enumerate(kinds))
    return ClusterFacts(partition=SlurmPartition("gpu", True, True, None, nodes), select=select)


def settled(facts: ClusterFacts, device: str = "auto", **slurm: Any) -> tuple[str, str, str | None]:
    chosen = slurm_gpus(job(job={"ranks_per_node": 4, "device": device}, slurm=slurm), facts)
    return chosen.device.kind, chosen.form.value, chosen.type.value


H100, A100, PLAIN, NONE, SLICES = (("h100", 8),), (("a100", 4),), ((None, 4),), (), (("1g.10gb", 7),)


@pytest.mark.parametrize(("kinds", "device", "slurm", "expected"), table(__file__, "choices.toml", "gpus", globals()))
def test_settle(kinds: tuple[Gpus, ...], device: str, slurm: dict[str, Any], expected: list[str | None]) -> None:
    assert [*settled(cluster(*kinds), device, **slurm)] == expected


def test_an_older_selection_plugin_knows_gres_only_and_an_unknown_partition_decides_nothing() -> None:
    assert settled(cluster(H100, select="select/cons_res"))[1] == "gres"
    assert settled(ClusterFacts()) == ("auto", "auto", None)


@pytest.mark.parametrize(("kinds", "slurm", "words"), table(__file__, "choices.toml", "refused_gpus", globals()))
def test_gpus_that_cannot_be_had(kinds: tuple[Gpus, ...], slurm: dict[str, Any], words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        settled(cluster(*kinds), **slurm)


def test_slices_are_known_by_name() -> None:
    names = "1g.10gb a100_3g.20gb nvidia_a100_3g.20gb 1g.10gb.me mig-3g a100-mig h100 a100_80gb a100-sxm4-80gb rtx_6000 enigma"
    assert [name for name in names.split() if MIG.search(name)] == names.split()[:6]


ANSWERS = table(__file__, "choices.toml", "answers")


def answer(argv: Sequence[str]) -> str:
    for question, said in ANSWERS.items():
        if " ".join(argv).startswith(question):
            return said
    raise CommandFailed("no")


@pytest.mark.parametrize(("error", "asked"), [
    (TimedOut("sinfo did not answer within 3 s"), 1),
    (CommandFailed("slurm_load_partitions: Unable to contact slurm controller (connect failure)"), 1),
    (CommandFailed("sinfo: error: fetch_config: DNS SRV lookup failed\n"
                   "sinfo: fatal: Could not establish a configuration source"), 1),
    (CommandFailed("sinfo is not on PATH"), 2),  # says nothing of the controller: scontrol is asked too
], ids=["late", "refused", "unconfigured", "absent"])
def test_a_silent_controller_is_asked_once(error: CommandFailed, asked: int) -> None:
    questions: list[tuple[str, ...]] = []

    def nothing(argv: Sequence[str]) -> str:
        questions.append(tuple(argv))
        if argv[1] == "--version":
            return "slurm 24.05.1"
        raise error

    facts = ask_cluster(job(), ask=nothing)
    assert facts.version == (24, 5) and facts.silence == str(error).splitlines()[-1]
    assert len([question for question in questions if question[1] != "--version"]) == asked
    nothing_said = ask_cluster(job(slurm={"container": "x"}), ask=silent)
    assert nothing_said == ClusterFacts(silence="sinfo is not on PATH"), "that is no error"


def test_what_the_cluster_says() -> None:
    facts = ask_cluster(job(slurm={"partition": "gpu", "container": "x"}), ask=answer)
    assert facts.partition is not None and facts.partition.name == "gpu" and facts.silence is None
    assert (facts.version, facts.cpus, facts.threads_per_core) == ((24, 5), 96, 2)
    assert (facts.select, facts.topology, facts.has_pyxis) == ("select/cons_tres", "topology/block", True)
    assert ask_cluster(job(), ask=answer).partition.name == "cpu"  # type: ignore[union-attr]
    assert ask_cluster(job(), release=(26, 5), ask=answer).version == (26, 5)
    assert ask_cluster(job(slurm={"partition": "none"}), ask=answer).partition is None


@pytest.mark.parametrize(("slurm", "words"), table(__file__, "choices.toml", "absent_partitions"))
def test_a_partition_that_is_not_there(slurm: dict[str, Any], words: str) -> None:
    spec = job(slurm=slurm)
    with pytest.raises(HpcMpError, match=words):
        slurm_gpus(spec, ask_cluster(spec, ask=answer))


@pytest.mark.parametrize("slurm", table(__file__, "choices.toml", "possible_partitions"))
def test_a_partition_that_may_be_there(slurm: dict[str, Any]) -> None:
    spec = job(job={"device": "cpu"}, slurm=slurm)
    assert slurm_gpus(spec, ask_cluster(spec, ask=answer)).device.kind == "cpu"
    named = job(job={"device": "cpu"}, slurm={"partition": "none"})
    nobody_knows_better = slurm_gpus(named, ask_cluster(named, ask=silent))
    assert nobody_knows_better.device.why.startswith("partitions unknown") and nobody_knows_better.form.value == "auto"


# --- jobs that no node of their partition could ever run, and jobs that look alike and could -------------------------


GIB = 2**30
LAB = SlurmPartition("lab", True, True, None, (NodeKind(("n1", "n2", "n3", "n4"), 4, 4 * GIB, ()),))
SHORT = SlurmPartition("short", False, True, "1-00:00:00", LAB.kinds)
MIXED = SlurmPartition("mixed", False, True, None, (
    NodeKind(("g1", "g2"), 64, 512 * GIB, (("h100", 8),)), NodeKind(("c1", "c2", "c3"), 128, 64 * GIB, ())))
LIMITS = (PartitionLimits(LAB, 4), PartitionLimits(SHORT, 4, min_nodes=2, max_nodes=3), PartitionLimits(MIXED, 5))
FACTS = ClusterFacts(partition=LAB, limits=LIMITS)


def spec(given: dict[str, Any], **slurm: Any) -> JobSpec:
    """One rank on one node unless it says otherwise, with as many sequences in a batch as ranks."""
    where = {"nodes": 1, "ranks_per_node": 1, **given}
    return job(job=where, slurm=slurm, train={"steps": 1, "global_batch": where["nodes"] * where["ranks_per_node"]})


def refusal(given: dict[str, Any], facts: ClusterFacts = FACTS, **slurm: Any) -> str:
    """What is said of a job; empty where it fits."""
    try:
        check_fit(spec(given, **slurm), facts)
    except HpcMpError as error:
        return str(error)
    return ""


FIT = tomllib.loads(Path(__file__).with_name("fit.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("words", "sections"), [*FIT["refused"].items(), *(("", sections) for sections in FIT["fits"])], ids=str)
def test_a_job_that_would_never_start_is_refused_and_no_other(words: str, sections: dict[str, Any]) -> None:
    said = refusal(sections.get("job", {}), **sections.get("slurm", {}))
    assert words in said and bool(said) == bool(words)


def test_what_slurm_does_not_tell_is_no_limit() -> None:
    assert refusal({"nodes": 99}, ClusterFacts()) == ""
    assert refusal({"nodes": 99}, replace(FACTS, rerouted=True)) == "", "a plug-in of the site may send it elsewhere"
    assert "99 nodes asked" in refusal({"nodes": 99}, replace(FACTS, rerouted=True), partition="lab")
    cloud = replace(FACTS, limits=(PartitionLimits(LAB, 100),))  # 96 nodes are powered down, and nobody knows what they have
    assert refusal({"nodes": 99, "ranks_per_node": 64}, cloud) == "" and "100" in refusal({"nodes": 101}, cloud)
    unset = replace(LAB, kinds=(replace(LAB.kinds[0], memory=2**20),))
    assert refusal({}, replace(FACTS, limits=(PartitionLimits(unset, 4),)), extra={"mem": "9G"}) == ""


def test_the_limits_of_a_partition() -> None:
    table = {"partition": "PartitionName=lab MaxNodes=3 MinNodes=1 MaxCPUsPerNode=3 TotalNodes=6 Nodes=n[1-6]",
             "node": "NodeName=n1 CPUEfctv=4 CPUTot=4 ThreadsPerCore=2"}
    found = partition_limits(LAB, lambda argv: table[argv[2]])
    assert (found.total, found.min_nodes, found.max_nodes, found.cpus, found.threads_per_core) == (6, 1, 3, 3, 2)
    assert found.partition.kinds[0].cpus == 3
    assert partition_limits(LAB, silent) == PartitionLimits(LAB, 4)


def test_the_memory_of_nodes_holds_the_state() -> None:
    given = spec({"nodes": 2, "ranks_per_node": 2})
    found = with_node_memory(Device("cpu", "x"), given, FACTS, [0, 1, 0, 1])
    assert [(pool.name, pool.size, pool.ranks) for pool in found.pools] == [
        ("a node of partition lab", 4 * GIB, (0, 2)), ("a node of partition lab", 4 * GIB, (1, 3))]
    assert with_node_memory(Device("cpu", "x"), job(slurm={"extra": {"mem": "1G"}}), FACTS, [0]).pools[0].size == GIB
    assert with_node_memory(Device("cuda", "x"), given, FACTS, [0]).pools == ()


# --- GPUs of a partition that lists none --------------------------------------------------------------------------


@pytest.mark.parametrize(("slurm", "elsewhere", "words"), table(__file__, "choices.toml", "uncounted_gpus"))
def test_gpus_that_slurm_would_never_give(slurm: dict[str, Any], elsewhere: tuple[str, ...], words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        slurm_gpus(job(job={"device": "cuda"}, slurm=slurm), replace(FACTS, gpu_partitions=elsewhere))


def test_cuda_as_asked() -> None:
    assert slurm_gpus(job(job={"device": "cuda"}), FACTS).device.why == "as asked; the partition lists no GPU"
    uncounted = job(job={"device": "cuda"}, slurm={"gpu_request": "none"})
    assert slurm_gpus(uncounted, replace(FACTS, gpu_partitions=("gpu",))).device.kind == "cuda"
    assert slurm_gpus(job(), FACTS).device.why == "as the partition has it"


# --- where it is asked --------------------------------------------------------------------------------------------

SINFO = 'echo "lab*|up|infinite|4|4000|(null)|n[1-4]"'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    executable(tmp_path / "bin", "scontrol", 'case "$1" in ping) echo "Slurmctld(primary) at x is UP";; *) exit 1;; esac')
    executable(tmp_path / "bin", "sinfo", f'echo "$3" >> {tmp_path}/asked; {SINFO}')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return write_job(tmp_path)


def test_nodes_and_cpus_come_before_the_arithmetic_of_batches(slurm: Path) -> None:
    for override, words in (("job.nodes=9", "9 nodes asked, the partition has 4"),
                            ("job.ranks_per_node=63", "needs 63 CPUs on each node")):
        with pytest.raises(HpcMpError, match=words):  # 18 and 126 ranks do not share a global batch of 8
            plan_job(LaunchRequest(slurm, "slurm", (override,)))
        with pytest.raises(HpcMpError, match="global_batch"):
            plan_job(LaunchRequest(slurm, "local", (override,)))


def test_the_cluster_is_asked_once(slurm: Path, tmp_path: Path) -> None:
    plans = plan_job(LaunchRequest(slurm, "slurm", ('sweep.runs=[{"train.seed" = 1}, {"train.seed" = 2}]',)))
    assert len(plans) == 2 and len((tmp_path / "asked").read_text().splitlines()) == 2  # partitions, states of nodes
    assert plans[0].device.pools[0].size == 4000 * 2**20
    with pytest.raises(HpcMpError, match=r"ranks on a node of partition lab: is more than its 3\.91 GiB of memory"):
        plan_job(LaunchRequest(slurm, "slurm", ("model.config.n_embd=4096", "model.config.n_layer=12")))


@pytest.mark.parametrize(("reason", "meaning", "remedy"), table(__file__, "choices.toml", "waiting_for_ever"))
def test_a_job_that_waits_for_ever(reason: str, meaning: str, remedy: str) -> None:
    ask = answers({"sinfo": "lab*|up|infinite|4|4000|(null)|n[1-4]\n"})
    found = never_starts(SlurmJob("7", "PENDING", reason), spec({"nodes": 9}), ask)
    assert found.meaning == meaning and found.remedy.startswith(remedy)
    fits = never_starts(SlurmJob("7", "PENDING", reason, "as the table has it"), spec({"nodes": 4}), ask)
    assert fits.meaning == "as the table has it"
    assert ask_cluster(job(), ask=ask).limits == (PartitionLimits(LAB_SEEN, 4),)


LAB_SEEN = replace(LAB, kinds=(replace(LAB.kinds[0], memory=4000 * 2**20),))
