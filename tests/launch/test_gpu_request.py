"""What the cluster decides for a job, and what it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from launching import silent
from rendering import job

from hpc_mp.base.command import CommandFailed, TimedOut
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.query import NodeKind, SlurmPartition
from hpc_mp.launch.choices import MIG, slurm_gpus
from hpc_mp.launch.facts import ClusterFacts, ask_cluster

Gpus = tuple[tuple[str | None, int], ...]


def cluster(*kinds: Gpus, select: str | None = "select/cons_tres") -> ClusterFacts:
    nodes = tuple(NodeKind((f"n{number}",), 64, 2**38, gpus) for number, gpus in enumerate(kinds))
    return ClusterFacts(partition=SlurmPartition("gpu", True, True, None, nodes), select=select)


def settled(facts: ClusterFacts, device: str = "auto", **slurm: Any) -> tuple[str, str, str | None]:
    chosen = slurm_gpus(job(job={"ranks_per_node": 4, "device": device}, slurm=slurm), facts)
    return chosen.device.kind, chosen.form.value, chosen.type.value


H100, A100, PLAIN, NONE, SLICES = (("h100", 8),), (("a100", 4),), ((None, 4),), (), (("1g.10gb", 7),)


@pytest.mark.parametrize(("kinds", "device", "slurm", "expected"), [
    ((NONE,), "auto", {}, ("cpu", "none", None)), ((NONE,), "cuda", {}, ("cuda", "none", None)),
    ((PLAIN,), "auto", {}, ("cuda", "gpus-per-node", None)), ((PLAIN,), "cpu", {}, ("cpu", "gpus-per-node", None)),
    ((H100,), "auto", {}, ("cuda", "gpus-per-node", "h100")),
    ((H100, NONE), "auto", {"gpu_request": "gres"}, ("cuda", "gres", "h100")),
    ((H100, A100), "auto", {"gpu_type": "a100"}, ("cuda", "gpus-per-node", "a100")),
    ((H100, A100), "auto", {"constraint": "ib"}, ("cuda", "gpus-per-node", None)),
    ((H100, A100), "auto", {"extra": {"nodelist": "n0"}}, ("cuda", "gpus-per-node", None)),
    ((H100, SLICES), "auto", {}, ("cuda", "gpus-per-node", "h100")), ((SLICES,), "cpu", {}, ("cpu", "gpus-per-node", None)),
    ((H100,), "auto", {"gpu_request": "none"}, ("cuda", "none", None)),
])
def test_settle(kinds: tuple[Gpus, ...], device: str, slurm: dict[str, Any], expected: tuple[str, str, str | None]) -> None:
    assert settled(cluster(*kinds), device, **slurm) == expected


def test_an_older_selection_plugin_knows_gres_only_and_an_unknown_partition_decides_nothing() -> None:
    assert settled(cluster(H100, select="select/cons_res"))[1] == "gres"
    assert settled(ClusterFacts()) == ("auto", "auto", None)


@pytest.mark.parametrize(("kinds", "slurm", "words"), [
    ((H100, A100), {}, r"partition gpu: has GPUs of several types: h100 \(8 per node\), a100 \(4 per node\)"),
    ((H100,), {"gpu_type": "h10"}, "Did you mean 'h100'?"),
    ((SLICES,), {}, r"partition gpu with GPUs 1g.10gb \(7 per node\): is a slice of a GPU \(MIG\)"),
    ((H100, SLICES), {"gpu_type": "1g.10gb"}, "gpu_type = '1g.10gb': is a slice"),
    (((("t4", 2),),), {}, "job.ranks_per_node = 4: needs as many GPUs on each node.*Use 2 or fewer"),
])
def test_gpus_that_cannot_be_had(kinds: tuple[Gpus, ...], slurm: dict[str, Any], words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        settled(cluster(*kinds), **slurm)


def test_slices_are_known_by_name() -> None:
    names = "1g.10gb a100_3g.20gb nvidia_a100_3g.20gb 1g.10gb.me mig-3g a100-mig h100 a100_80gb a100-sxm4-80gb rtx_6000 enigma"
    assert [name for name in names.split() if MIG.search(name)] == names.split()[:6]


ANSWERS = {
    ("sinfo", "--noheader", "--all"): "cpu\ngpu\nhidden\n",
    ("sinfo",): "cpu*|up|1-00:00:00|64|512000|(null)|n[1-2]\ngpu|up|infinite|128|1024000|gpu:h100:8|g[1-4]\n",
    ("scontrol", "show", "node"): "NodeName=g1 CoresPerSocket=32 CPUAlloc=0 CPUEfctv=124 CPUTot=128 ThreadsPerCore=2 OS=Linux 6",
    ("scontrol", "show", "partition"): "PartitionName=gpu MaxCPUsPerNode=96 Nodes=g[1-4]",
    ("scontrol", "show", "config"): "SelectType              = select/cons_tres\nTopologyPlugin          = topology/block\n",
    ("scontrol", "--version"): "slurm-wlm 24.05.3",
    ("srun", "--help"): "  -n, --ntasks=ntasks  number\n      --container-image=[USER@]\n",
}


def answer(argv: Sequence[str]) -> str:
    for question, said in ANSWERS.items():
        if tuple(argv[:len(question)]) == question:
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


@pytest.mark.parametrize(("slurm", "words"), [
    ({"partition": "gpus"}, r"'gpus': is no partition of this cluster, which shows cpu, gpu. Did you mean 'gpu'\?"),
    ({"partition": "gpu,none,cpu"}, r"slurm.partition = 'none': .* Choose one of these"),
    ({"components": [{"nodes": 1, "partition": "GPU"}]}, "slurm.components: partition = 'GPU'"),
])
def test_a_partition_that_is_not_there(slurm: dict[str, Any], words: str) -> None:
    spec = job(slurm=slurm)
    with pytest.raises(HpcMpError, match=words):
        slurm_gpus(spec, ask_cluster(spec, ask=answer))


@pytest.mark.parametrize("slurm", [
    {"partition": "gpu,cpu"}, {"partition": "hidden"}, {"partition": "cpu,hidden"},
    {"partition": "elsewhere", "extra": {"clusters": "other"}}, {},
])
def test_a_partition_that_may_be_there(slurm: dict[str, Any]) -> None:
    spec = job(job={"device": "cpu"}, slurm=slurm)
    assert slurm_gpus(spec, ask_cluster(spec, ask=answer)).device.kind == "cpu"
    named = job(job={"device": "cpu"}, slurm={"partition": "none"})
    nobody_knows_better = slurm_gpus(named, ask_cluster(named, ask=silent))
    assert nobody_knows_better.device.why.startswith("partitions unknown") and nobody_knows_better.form.value == "auto"
