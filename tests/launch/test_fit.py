"""Jobs that no node of their partition could ever run, and jobs that look alike and could."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import answers, executable, silent, write_job
from rendering import job

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.job import SlurmJob
from hpc_mp.cluster.slurm.partition import PartitionLimits, partition_limits
from hpc_mp.cluster.slurm.query import NodeKind, SlurmPartition
from hpc_mp.job import JobSpec
from hpc_mp.launch.choices import slurm_gpus
from hpc_mp.launch.facts import ClusterFacts, ask_cluster
from hpc_mp.launch.fit import check_fit, never_starts, with_node_memory
from hpc_mp.launch.launch import LaunchRequest, plan_job
from hpc_mp.planner.device import Device

GIB = 2**30
LAB = SlurmPartition("lab", True, True, None, (NodeKind(("n1", "n2", "n3", "n4"), 4, 4 * GIB, ()),))
SHORT = SlurmPartition("short", False, True, "1-00:00:00", LAB.kinds)
MIXED = SlurmPartition("mixed", False, True, None, (
    NodeKind(("g1", "g2"), 64, 512 * GIB, (("h100", 8),)), NodeKind(("c1", "c2", "c3"), 128, 64 * GIB, ())))
LIMITS = (PartitionLimits(LAB, 4), PartitionLimits(SHORT, 4, min_nodes=2, max_nodes=3), PartitionLimits(MIXED, 5))
FACTS = ClusterFacts(partition=LAB, limits=LIMITS)
CUDA = {"device": "cuda", "ranks_per_node": 8}


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


@pytest.mark.parametrize(("given", "slurm", "words"), [
    ({"nodes": 9}, {}, "job.nodes = 9: 9 nodes asked, the partition has 4. Use 4 or fewer, or another partition than lab"),
    ({"nodes": 4}, {"extra": {"exclude": "n[1-2],x9"}}, "4 nodes asked, the partition has 4, of which slurm.extra.exclude "
     "leaves 2"),
    ({"nodes": 4}, {"partition": "short"}, "4 nodes asked, the partition gives a job at most 3 (MaxNodes of short)"),
    ({"nodes": 1}, {"partition": "short"}, "1 node asked, the partition takes no job of fewer than 2"),
    ({"nodes": 9}, {"partition": "short,lab"}, "the partition has 4"),
    ({"ranks_per_node": 64}, {}, "job.ranks_per_node = 64: needs 64 CPUs on each node, one for each rank, and the nodes of "
     "partition lab have at most 4 CPUs. Use 4 or fewer, on more nodes"),
    ({"ranks_per_node": 2}, {"extra": {"cpus-per-task": 3}}, "needs 6 CPUs on each node, ranks_per_node(2) × cpus-per-task(3), "
     "and the nodes of partition lab have at most 4 CPUs. Use 1 or fewer, on more nodes"),
    ({}, {"extra": {"cpus-per-task": 5}}, "Lower slurm.extra.cpus-per-task = 5 to 4 or less"),
    ({"nodes": 4, "ranks_per_node": 100}, {"partition": "mixed"}, "only 3 of partition mixed have that, and 4 nodes asked"),
    ({}, {"extra": {"mem": "100G"}}, "slurm.extra.mem = '100G': needs 100 GiB on each node, and the nodes of partition lab have"),
    ({"ranks_per_node": 3}, {"extra": {"mem-per-cpu": "2G"}}, "needs 6 GiB on each node"),
    ({"nodes": 2, "time_limit": "2-0"}, {"partition": "short"}, "job.time_limit = '2-0': is longer than it may be: a job of "
     "partition short has at most 1-00:00:00"),
    ({"nodes": 2, "time_limit": "0"}, {"partition": "short"}, "is no limit at all, and a job of partition short has"),
    ({"nodes": 3, **CUDA}, {"partition": "mixed", "gpu_request": "gres"},
     "needs 8 GPUs on each node, and only 2 of partition mixed"),
    ({"nodes": 1, **CUDA, "ranks_per_node": 16}, {"partition": "mixed", "gpu_request": "gres"}, "have at most 8 GPUs. Use 8 or"),
    ({"nodes": 2, **CUDA, "ranks_per_node": 8}, {"partition": "mixed", "gpu_request": "gres", "extra": {"exclude": "g2"}},
     "only 1 of partition mixed has that, and 2 nodes asked"),
    ({"nodes": 1}, {"partition": "mixed", "extra": {"cpus-per-task": 100, "mem": "100G"}},
     "needs nodes with 100 CPUs and 100 GiB, and partition mixed has 0 of them"),
    ({"nodes": 10}, {"components": [{"nodes": 1}, {"nodes": 9, "partition": "short"}]}, "slurm.components[1].nodes = 9"),
])
def test_a_job_that_would_never_start_is_refused(given: dict[str, Any], slurm: dict[str, Any], words: str) -> None:
    assert words in refusal(given, **slurm)


@pytest.mark.parametrize(("given", "slurm"), [
    ({"nodes": 4, "ranks_per_node": 4}, {}),
    ({"nodes": 4, "time_limit": "9-0"}, {"partition": "short,lab"}),  # one that could is enough
    ({"nodes": 9}, {"partition": "lab,hidden"}), ({"nodes": 9}, {"extra": {"clusters": "other"}}),
    ({"nodes": 4, "time_limit": "0"}, {"partition": "short", "qos": "long"}),  # which may lift the limits of a partition
    ({"nodes": 2, "time_limit": "9-0"}, {"partition": "short", "extra": {"time-min": "10"}}),
    ({"nodes": 2, "time_limit": "1-0"}, {"partition": "short"}), ({"ranks_per_node": 64}, {"extra": {"overcommit": True}}),
    ({"nodes": 4}, {"extra": {"exclude": "/home/me/bad"}}),
    ({"nodes": 2, **CUDA}, {"partition": "mixed", "gpu_request": "gpus-per-node"}),
    ({"nodes": 3, **CUDA}, {"partition": "mixed", "gpu_request": "none"}),
    ({"device": "cuda"}, {"gpu_request": "gres"}),  # for slurm_gpus to refuse
    ({}, {"extra": {"mem": "0"}}), ({}, {"extra": {"mem": "4000"}}), ({"nodes": 5}, {"partition": "mixed"}),
])
def test_a_job_that_may_start_is_not(given: dict[str, Any], slurm: dict[str, Any]) -> None:
    assert refusal(given, **slurm) == ""


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
    less = with_node_memory(Device("cpu", "x"), job(slurm={"extra": {"mem": "1G"}}), FACTS, [0])
    assert less.pools[0].size == GIB
    assert with_node_memory(Device("cuda", "x"), given, FACTS, [0]).pools == ()


# --- GPUs of a partition that lists none --------------------------------------------------------------------------


@pytest.mark.parametrize(("slurm", "elsewhere", "words"), [
    ({"gpu_request": "gres"}, (), "slurm.gpu_request = 'gres': asks Slurm for GPUs, and partition lab lists no GPU"),
    ({"gpu_type": "h100"}, (), "slurm.gpu_type = 'h100': asks Slurm for GPUs"),
    ({}, ("gpu",), "job.device = 'cuda': partition lab lists no GPU, and Slurm counts those of gpu. Choose slurm.partition"),
])
def test_gpus_that_slurm_would_never_give(slurm: dict[str, Any], elsewhere: tuple[str, ...], words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        slurm_gpus(job(job={"device": "cuda"}, slurm=slurm), replace(FACTS, gpu_partitions=elsewhere))


def test_cuda_as_asked() -> None:
    asked = job(job={"device": "cuda"})
    assert slurm_gpus(asked, FACTS).device.why == "as asked; the partition lists no GPU"
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


@pytest.mark.parametrize(("reason", "meaning", "remedy"), [
    ("PartitionConfig", "9 nodes asked, the partition has 4", "cancel it and launch again with another job.nodes: use 4"),
    ("Priority", "", ""),
])
def test_a_job_that_waits_for_ever(reason: str, meaning: str, remedy: str) -> None:
    ask = answers({"sinfo": "lab*|up|infinite|4|4000|(null)|n[1-4]\n"})
    found = never_starts(SlurmJob("7", "PENDING", reason), spec({"nodes": 9}), ask)
    assert found.meaning == meaning and found.remedy.startswith(remedy)
    fits = never_starts(SlurmJob("7", "PENDING", reason, "as the table has it"), spec({"nodes": 4}), ask)
    assert fits.meaning == "as the table has it"
    assert ask_cluster(job(), ask=ask).limits == (PartitionLimits(LAB_SEEN, 4),)


LAB_SEEN = replace(LAB, kinds=(replace(LAB.kinds[0], memory=4000 * 2**20),))
