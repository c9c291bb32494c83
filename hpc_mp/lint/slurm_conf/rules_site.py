"""Rules on the equipment of the cluster: GPUs, memory, nodes, partitions, switches, accounting, health."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.cluster.slurm.conf_file import read_conf
from hpc_mp.cluster.slurm.limits import seconds
from hpc_mp.cluster.slurm.query import parse_gpus
from hpc_mp.cluster.slurm.records import Words
from hpc_mp.cluster.topology.check import agreement
from hpc_mp.cluster.topology.model import chosen
from hpc_mp.cluster.topology.reading import listed
from hpc_mp.lint.slurm_conf.conf_files import expanded
from hpc_mp.lint.slurm_conf.config import SlurmFacts, number
from hpc_mp.lint.slurm_conf.rules_jobs import GRACE_S, has_value

FLAT = ("", "topology/none", "topology/default", "topology/flat")
OUT = {"DOWN", "DRAIN", "FAIL", "FAILING", "INVAL", "INVALID_REG"}  # states of a node
NODES_SHOWN = 3  # number of reasons for broken nodes that are shown


def _select(facts: SlurmFacts) -> Iterator[Hit]:
    if facts.gpu_nodes and (plugin := facts.says("SelectType")) and plugin != "select/cons_tres":
        yield Hit(subject=f"SelectType={plugin}")


def _memory(facts: SlurmFacts) -> Iterator[Hit]:
    whole = facts.says("SelectType").lower() == "select/linear" or (facts.partitions and all(map(_alone, facts.partitions)))
    if "SelectTypeParameters" in facts.config and "memory" not in facts.says("SelectTypeParameters").lower() and not whole:
        yield Hit(subject=facts.shown("SelectTypeParameters"))


def _alone(partition: Words) -> bool:
    """Return True if jobs of this partition share no node, or its own SelectTypeParameters allocate memory."""
    fields = {key.lower(): value.lower() for key, value in partition.items()}
    exclusive = fields.get("oversubscribe", fields.get("shared", "")) == "exclusive"
    return exclusive or "memory" in fields.get("selecttypeparameters", "")


def _gres_file(facts: SlurmFacts) -> Iterator[Hit]:
    """Yield GPUs in gres.conf without File=, MultipleFiles= or AutoDetect=, on their line or on a line for all."""
    lines = [line.text.strip().lower() for line in read_conf(facts.gres_conf or "")]
    if not facts.gpu_nodes or any(re.match(r"autodetect=(?!off)", line) for line in lines):
        return
    for line in lines:
        if re.search(r"\bname=gpu\b", line) and not re.search("files?=", line) and not re.search(r"autodetect=(?!off)", line):
            yield Hit(subject=f"gres.conf: {line}")


def _gres_broken(facts: SlurmFacts) -> Iterator[Hit]:
    hit = [node for node in facts.nodes if re.search(r"gres/gpu|GRES", node.get("Reason", ""))]
    if hit:
        yield Hit(subject=f"{listed(node['NodeName'] for node in hit)}: {hit[0]['Reason']}")


def _gres_type(facts: SlurmFacts) -> Iterator[Hit]:
    bare = [node for node in facts.gpu_nodes if re.match(r"gpu:\d", node["Gres"])]
    typed = [node for node in facts.gpu_nodes if re.match(r"gpu:[^\d]", node["Gres"])]
    if bare and typed:
        bare_names, typed_names = (listed(node["NodeName"] for node in nodes) for nodes in (bare, typed))
        yield Hit(subject=f"{bare_names} without a type, {typed_names} with one")


def _mixed(facts: SlurmFacts) -> Iterator[Hit]:
    for partition in facts.partitions:
        inside = set(expanded(partition.get("Nodes", "")))
        kinds = Counter(re.sub(r"\(.*?\)", "", node.get("Gres", "")) or "no GPU" for node in facts.nodes
                        if node.get("NodeName") in inside)
        if len(kinds) > 1 and any("gpu" in kind for kind in kinds):
            summary = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common())
            yield Hit(subject=f"{partition['PartitionName']}: {summary}")


def _tiny(facts: SlurmFacts) -> Iterator[Hit]:
    small = [node for node in facts.nodes if (number(node, "RealMemory") or 1000) <= 1]
    if small:
        yield Hit(subject=f"{listed(node['NodeName'] for node in small)}: RealMemory=1")


def _few_cpus(facts: SlurmFacts) -> Iterator[Hit]:
    few: dict[str, list[str]] = {}
    for node in facts.nodes:
        cpus, gpus = number(node, "CPUTot"), sum(count for _, count in parse_gpus(node.get("Gres", "")))
        if cpus is not None and cpus < max(gpus, 2):
            few.setdefault(f"CPUTot={cpus}" + (f" for {gpus} GPUs" if gpus else ""), []).append(node["NodeName"])
    for shortage, nodes in few.items():
        yield Hit(subject=f"{listed(nodes)}: {shortage}")


def _broken(facts: SlurmFacts) -> Iterator[Hit]:
    """Yield broken nodes. A cloud node that is powered off does not respond, but is started for a job."""
    reasons: dict[str, list[str]] = {}
    for node in facts.nodes:
        states = {*re.findall(r"[A-Z_]+", node.get("State", ""))}
        if states & OUT or ("NOT_RESPONDING" in states and not any(state.startswith("POWER") for state in states)):
            text = re.sub(r"\s*\[\w*@.*\]$", "", node.get("Reason", "")) or "no reason"
            reasons.setdefault(f"{node['State']}: {text}", []).append(node["NodeName"])
    for reason, nodes in list(reasons.items())[:NODES_SHOWN]:
        yield Hit(subject=f"{listed(nodes)} {reason}")
    if len(reasons) > NODES_SHOWN:
        yield Hit(subject=f"{sum(map(len, list(reasons.values())[NODES_SHOWN:]))} more nodes for other reasons")


def _releases(facts: SlurmFacts) -> Iterator[Hit]:
    counts = Counter(node["Version"] for node in facts.nodes if node.get("Version"))
    if len(counts) > 1:
        yield Hit(subject=", ".join(f"{count} nodes with {release}" for release, count in counts.most_common()))


def _default(facts: SlurmFacts) -> Iterator[Hit]:
    if facts.partitions and not any(partition.get("Default") == "YES" for partition in facts.partitions):
        yield Hit(subject="no partition has Default=YES")


def _closed(facts: SlurmFacts) -> Iterator[Hit]:
    for partition in facts.partitions:
        if partition.get("State", "UP") != "UP":
            yield Hit(subject=f"{partition['PartitionName']}: State={partition['State']}")


def _max_nodes(facts: SlurmFacts) -> Iterator[Hit]:
    for partition in facts.partitions:
        limit, total = number(partition, "MaxNodes"), number(partition, "TotalNodes")
        if limit is not None and total is not None and limit < total:
            yield Hit(subject=f"{partition['PartitionName']}: MaxNodes={limit} of {total}")


def _shared(facts: SlurmFacts) -> Iterator[Hit]:
    if "CR_LLN" in facts.says("SelectTypeParameters").upper():
        yield Hit(subject=facts.shown("SelectTypeParameters"))
    for partition in facts.partitions:
        if partition.get("OverSubscribe", "NO").startswith("FORCE") or partition.get("LLN") == "YES":
            settings = f"OverSubscribe={partition.get('OverSubscribe')} LLN={partition.get('LLN')}"
            yield Hit(subject=f"{partition['PartitionName']}: {settings}")


def _preemptable(facts: SlurmFacts) -> Iterator[tuple[Words, set[str]]]:
    """Yield partitions whose jobs can be preempted, with the modes."""
    if facts.says("PreemptType") not in ("", "preempt/none"):
        for partition in facts.partitions:
            yield partition, {*partition.get("PreemptMode", "OFF").split(",")} - {"OFF"}


def _grace(facts: SlurmFacts) -> Iterator[Hit]:
    for partition, modes in _preemptable(facts):
        if modes - {"SUSPEND", "GANG"} and (number(partition, "GraceTime") or 0) < GRACE_S:
            settings = f"PreemptMode={partition['PreemptMode']} GraceTime={partition.get('GraceTime', '0')}"
            yield Hit(subject=f"{partition['PartitionName']}: {settings}")


def _suspends(facts: SlurmFacts) -> Iterator[Hit]:
    for partition, modes in _preemptable(facts):
        if "SUSPEND" in modes:
            yield Hit(subject=f"{partition['PartitionName']}: PreemptMode={partition['PreemptMode']}")


def _short(facts: SlurmFacts) -> Iterator[Hit]:
    for partition in facts.partitions:
        limit = partition.get("MaxTime", "UNLIMITED")
        if re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", limit) and seconds(limit) < 3600:
            yield Hit(subject=f"{partition['PartitionName']}: MaxTime={limit}")


def _knows_none(facts: SlurmFacts) -> bool:
    """Return True if no topology is configured. With a topology.yaml, Slurm shows but ignores the plug-in in slurm.conf."""
    return facts.says("TopologyPlugin") in FLAT and not facts.tree.above


def _flat(facts: SlurmFacts) -> Iterator[Hit]:
    if facts.measured is not None and _knows_none(facts):
        comparison = agreement(facts.tree, facts.measured)
        if comparison.verdict == "disagrees":
            yield Hit(subject=f"TopologyPlugin={facts.says('TopologyPlugin') or '(none)'}; {comparison.why}")


def _unmeasured(facts: SlurmFacts) -> Iterator[Hit]:
    if facts.measured is None and _knows_none(facts) and len(facts.nodes) > 1:
        yield Hit(subject=facts.shown("TopologyPlugin"))


def _disagrees(facts: SlurmFacts) -> Iterator[Hit]:
    if facts.measured is not None and facts.topologies and not _knows_none(facts):
        for odd in agreement(facts.tree, facts.measured).odd:
            yield Hit(subject=str(odd))


def _outside(facts: SlurmFacts) -> Iterator[Hit]:
    tree = facts.tree
    lost = [node["NodeName"] for node in facts.nodes if tree.leaf(node.get("NodeName", "")) is None]
    if tree.above and lost:
        yield Hit(subject=f"{listed(lost)}: not under a switch of the topology")


def _rootless(facts: SlurmFacts) -> Iterator[Hit]:
    topology = chosen(facts.topologies or ())
    if topology.kind == "tree" and topology.apart:
        yield Hit(subject=f"no switch is above {', '.join(topology.apart[:8])}")


def _gpus_uncounted(facts: SlurmFacts) -> Iterator[Hit]:
    keeps = facts.says("AccountingStorageType") == "accounting_storage/slurmdbd"
    if keeps and facts.gpu_nodes and not any(word.startswith("gres/gpu") for word in facts.listed("AccountingStorageTRES")):
        yield Hit(subject=facts.shown("AccountingStorageTRES"))


def _no_health(facts: SlurmFacts) -> Iterator[Hit]:
    if "HealthCheckProgram" in facts.config and not facts.says("HealthCheckProgram"):
        yield Hit(subject="HealthCheckProgram is not set")


def _idle_health(facts: SlurmFacts) -> Iterator[Hit]:
    if facts.says("HealthCheckProgram") and facts.seconds("HealthCheckInterval") == 0:
        yield Hit(subject=f"HealthCheckProgram={facts.says('HealthCheckProgram')}, HealthCheckInterval=0")


def _suspended(facts: SlurmFacts) -> Iterator[Hit]:
    wait = facts.seconds("SuspendTime")
    if wait is not None and 0 < wait < 600 and any("CLOUD" in node.get("State", "") for node in facts.nodes):
        yield Hit(subject=f"SuspendTime={wait} s")


_ADMIN = "slurm.conf: "
_WRITE = "`hpc-mp cluster topology --from measured --to tree` writes the measured topology"
RULES: tuple[Rule[SlurmFacts], ...] = (
    Rule("cons-tres", "error", _select, "jobs cannot request GPUs per node, task or socket (--gpus-per-node)",
         _ADMIN + "SelectType=select/cons_tres"),
    Rule("memory-shared", "warning", _memory, "memory is not allocated: two jobs on a node take it from each other",
         _ADMIN + "SelectTypeParameters=CR_Core_Memory"),
    Rule("gres-file", "error", _gres_file,
         "Slurm does not know the devices of these GPUs: it cannot confine jobs to them, and drains the nodes",
         "gres.conf: File=/dev/nvidia[0-7], or AutoDetect=nvml"),
    Rule("gres-broken", "error", _gres_broken, "the GPUs of these nodes differ from gres.conf, and the nodes take no jobs",
         "run `nvidia-smi -L` and `hpc-mp doctor` on them; repair gres.conf or the node, then State=RESUME"),
    Rule("gres-types", "warning", _gres_type, "a job that requests a GPU type never gets the nodes without a type",
         "name the type on all nodes, in slurm.conf and gres.conf"),
    Rule("mixed-nodes", "info", _mixed, "a job may get nodes of several kinds, and the slowest GPU sets its speed",
         "request one kind: slurm.gpu_type, slurm.constraint"),
    Rule("real-memory", "warning", _tiny, "no job that requests memory fits these nodes",
         "set RealMemory to the value that `slurmd -C` prints on the node"),
    Rule("few-cpus", "warning", _few_cpus, "ranks share processors: they wait for each other, and for their data",
         "set CPUs=, Sockets= and CoresPerSocket= to the values that `slurmd -C` prints on the node"),
    Rule("nodes-out", "info", _broken, "these nodes take no jobs",
         "run `hpc-mp doctor` on them, then scontrol update … State=RESUME"),
    Rule("slurmd-releases", "info", _releases, "daemons of different releases behave differently from node to node",
         "finish the upgrade"),
    Rule("default-partition", "info", _default, "Slurm refuses jobs without a partition", "set slurm.partition"),
    Rule("partition-closed", "info", _closed, "it starts no jobs", "use another, or `scontrol update PartitionName=… State=UP`"),
    Rule("max-nodes", "info", _max_nodes, "a job cannot get more of its nodes",
         "MaxNodes=UNLIMITED, or a partition for large runs"),
    Rule("nodes-shared", "warning", _shared,
         "ranks of several jobs share cores, or are spread over the least loaded nodes: the speed is unpredictable",
         "OverSubscribe=NO LLN=NO for partitions with GPUs, or --exclusive in the job (slurm.extra)"),
    Rule("grace-time", "warning", _grace, f"a preempted job is ended before it has saved (ranks need {GRACE_S} s)",
         f"GraceTime={GRACE_S} for this partition or its QOS"),
    Rule("preempt-suspend", "warning", _suspends,
         "a suspended job keeps its GPU memory, so the next job does not fit, and its own ranks time out",
         "PreemptMode=REQUEUE for this partition or its QOS"),
    Rule("short-limit", "info", _short, "a run needs many jobs, one after another", "set slurm.chain"),
    Rule("topology-none", "warning", _flat,
         "the measured rates show leaf switches that Slurm does not know: it spreads jobs over them, and hpc-mp cannot place "
         "neighbouring ranks together",
         _WRITE + "; then " + _ADMIN + "TopologyPlugin=topology/tree"),
    Rule("topology-unknown", "info", _unmeasured, "it is unknown if leaf switches affect the speed",
         "`hpc-mp doctor cluster --nodes N` measures between nodes"),
    Rule("topology-wrong", "warning", _disagrees, "Slurm places a job on nodes that are far apart, and hpc-mp orders hosts by it",
         "check the cables; " + _WRITE),
    Rule("topology-outside", "warning", _outside, "no job gets these nodes together with others",
         "add them to topology.conf"),
    Rule("topology-apart", "warning", _rootless, "Slurm starts no job across them",
         "add a SwitchName= with Switches= above them if they are one fabric"),
    Rule("accounting-off", "warning", has_value("AccountingStorageType", "accounting_storage/none", ""),
         "usage, exit reasons and owners of jobs are lost after MinJobAge; fair share and limits do not work",
         _ADMIN + "AccountingStorageType=accounting_storage/slurmdbd"),
    Rule("gpus-uncounted", "warning", _gpus_uncounted, "GPU hours are not counted, and cannot be limited",
         _ADMIN + "AccountingStorageTRES=gres/gpu"),
    Rule("health-none", "warning", _no_health, "a node with a failed GPU or NIC keeps taking jobs, and all of them fail",
         "`hpc-mp doctor install DIR` writes one"),
    Rule("health-idle", "warning", _idle_health, "the health check never runs", _ADMIN + "HealthCheckInterval=60"),
    Rule("suspend-soon", "info", _suspended, "nodes power down between the jobs of a chain, and must boot again",
         "SuspendTime=1800, or keep the nodes (azslurm keep_alive)"),
)
