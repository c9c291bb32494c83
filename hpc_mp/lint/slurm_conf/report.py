"""A description of a cluster: partitions, GPUs, networks, switches, job settings, and faults."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpc_mp.base.findings import Finding, findings_document, weight
from hpc_mp.base.grouping import grouped
from hpc_mp.cluster.slurm.nodelist import expanded
from hpc_mp.cluster.slurm.query import parse_gpus
from hpc_mp.cluster.slurm.records import Words
from hpc_mp.cluster.topology.model import chosen
from hpc_mp.lint.slurm_conf.config import SlurmFacts, number
from hpc_mp.lint.slurm_conf.rules_site import RULES

NETWORK = re.compile(r"\b(ib|infiniband|fdr|edr|hdr|ndr|xdr|opa|roce|efa|slingshot|cxi|rdma|mlx\w*|hca\w*|nic\w*)\b",
                     re.IGNORECASE)
SETTINGS = ("SLURM_VERSION", "SelectType", "SelectTypeParameters", "TaskPlugin", "ProctrackType", "MpiDefault",
            "AccountingStorageType", "AccountingStorageEnforce", "HealthCheckProgram", "HealthCheckInterval", "JobRequeue",
            "KillWait", "PriorityType", "PreemptType", "PreemptMode", "PrologFlags", "JobSubmitPlugins",
            "TopologyPlugin", "TopologyParam", "SlurmdTimeout", "ReturnToService", "GresTypes", "SuspendTime")
"""Settings that matter for training, in the order of display; prologs are shown in addition."""


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a cluster."""

    cluster: str
    # the settings of slurm.conf in ``SETTINGS`` and the prologs, as Slurm shows them; "" for an unset one
    settings: Mapping[str, str]
    constrain: tuple[str, ...] | None  # the resources that cgroup.conf constrains; None if unknown
    partitions: tuple[dict[str, Any], ...]  # in Slurm's notation, with ``groups`` of equal nodes: number, states, GPUs
    networks: tuple[str, ...]  # NICs in features and GRES, and the platform that the doctor noted; empty if Slurm reports none
    platform: str | None
    topology: str
    switches: tuple[int, ...]  # the number of switches per level of the topology, the leaves first
    # settings that are wrong for training, the most serious first; the subject is the setting as Slurm shows it
    findings: tuple[Finding, ...]
    unseen: tuple[str, ...]  # queries that failed

    def document(self) -> dict[str, Any]:
        return asdict(self) | findings_document(self.findings)


def describe(facts: SlurmFacts) -> Description:
    """Return the description of a cluster. A pure function of the facts."""
    findings = [finding for rule in RULES for finding in rule.apply(facts)]
    settings = {key: facts.says(key) for key in SETTINGS if key in facts.config}
    settings |= {key: value for key, value in facts.config.items() if re.match(r"(Task)?(Prolog|Epilog)(Slurmctld)?(\[|$)", key)}
    return Description(
        cluster=facts.says("ClusterName"), settings=settings,
        constrain=None if facts.cgroup is None else tuple(
            key for key, value in facts.cgroup.items() if key.lower().startswith("constrain") and value.lower() == "yes"),
        partitions=tuple(_partition(facts, partition) for partition in facts.partitions), networks=_networks(facts),
        platform=facts.measured.platform if facts.measured else None, topology=chosen(facts.topologies or ()).kind,
        switches=_storeys(facts), findings=tuple(sorted(findings, key=weight)), unseen=facts.unseen)


def _partition(facts: SlurmFacts, partition: Words) -> dict[str, Any]:
    inside = set(expanded(partition.get("Nodes", "")))
    kinds = grouped((tuple(node.get(key, "") for key in (
        "CPUEfctv" if "CPUEfctv" in node else "CPUTot", "RealMemory", "Gres", "AvailableFeatures")), node)
        for node in facts.nodes if node.get("NodeName") in inside)
    return {"name": partition.get("PartitionName", ""), "default": partition.get("Default") == "YES",
            "state": partition.get("State", ""), "max_time": partition.get("MaxTime", ""),
            "max_nodes": partition.get("MaxNodes", ""), "preempt_mode": partition.get("PreemptMode", ""),
            "groups": tuple(map(_group, kinds.values()))}


def _group(nodes: list[Words]) -> dict[str, Any]:
    """Return equal nodes: memory in MB per node, GPUs as (type or None, number per node), the number of nodes by state."""
    first = nodes[0]
    gres = first.get("Gres", "")
    return {"nodes": len(nodes), "cpus": number(first, "CPUEfctv") or number(first, "CPUTot"),
            "memory": number(first, "RealMemory"), "gres": gres, "gpus": parse_gpus(gres),
            "features": tuple(filter(None, first.get("AvailableFeatures", "").split(","))),
            "states": dict(Counter(node.get("State", "?") for node in nodes))}


def _networks(facts: SlurmFacts) -> tuple[str, ...]:
    words = (word for node in facts.nodes for key in ("AvailableFeatures", "Gres") for word in node.get(key, "").split(","))
    return tuple(dict.fromkeys(word for word in words if word and NETWORK.search(re.sub(r"[_-]", " ", word))))


def _storeys(facts: SlurmFacts) -> tuple[int, ...]:
    chains = list(facts.tree.above.values())
    deepest = max(map(len, chains), default=0)
    return tuple(len({chain[storey] for chain in chains if storey < len(chain)}) for storey in range(deepest))
