"""A partition's limits for one job: number of nodes, time, and the resources of each node."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hpc_mp.base.command import Runner, ask
from hpc_mp.cluster.slurm.query import SlurmPartition
from hpc_mp.cluster.slurm.records import find_record


@dataclass(frozen=True, slots=True)
class PartitionLimits:
    """The limits of a partition on one job."""

    partition: SlurmPartition  # the partition with its visible nodes; the ``cpus`` of its kinds are those that a job may use
    total: int  # number of its nodes, including those that sinfo hides: powered-down nodes of a cloud
    # min_nodes, max_nodes: limits on the nodes of a job; None without such a limit
    min_nodes: int | None = None
    max_nodes: int | None = None
    cpus: int | None = None  # the minimum over its nodes of CPUs that a job may use; None if Slurm shows no records of them
    threads_per_core: int = 1  # of these nodes


def partition_limits(partition: SlurmPartition, ask: Runner = ask) -> PartitionLimits:
    """Query the partition's record, and the record of one node of each kind. An unanswered query sets no limit."""
    record = find_record("partition", partition.name, ask)
    nodes = [find_record("node", kind.nodes[0], ask) for kind in partition.kinds]
    most_cpus = _numbers([record.get("MaxCPUsPerNode")])
    usable = [min([*_numbers([node.get("CPUEfctv") or node.get("CPUTot")]), *most_cpus], default=None) for node in nodes]
    kinds = tuple(kind if cpus is None else replace(kind, cpus=cpus) for kind, cpus in zip(partition.kinds, usable, strict=True))
    visible = sum(len(kind.nodes) for kind in kinds)
    return PartitionLimits(
        replace(partition, kinds=kinds),
        total=max([visible, *_numbers([record.get("TotalNodes")])]),
        min_nodes=_number(record.get("MinNodes")),
        max_nodes=_number(record.get("MaxNodes")),
        cpus=min((cpus for cpus in usable if cpus is not None), default=None),
        threads_per_core=max(_numbers(node.get("ThreadsPerCore") for node in nodes), default=1),
    )


def _number(text: str | None) -> int | None:
    """Parse a number; None also for UNLIMITED."""
    return next(iter(_numbers([text])), None)


def _numbers(texts: Iterable[str | None]) -> list[int]:
    return [int(text) for text in texts if text and text.isdigit()]
