"""Default numbers of nodes and ranks of a program: from the surrounding allocation, else from one node's GPUs."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpc_mp.base.text import counted
from hpc_mp.cluster.node.nvidia_smi import find_gpus
from hpc_mp.cluster.slurm.allocation import AllocatedTasks, Where, allocated_tasks, decide
from hpc_mp.job import ProgramSpec
from hpc_mp.launch.facts import ClusterFacts, ask_cluster


@dataclass(frozen=True, slots=True)
class ProgramSize:
    """The size of a program. ``why``: source of the numbers that were not given; empty if both were."""

    nodes: int
    ranks_per_node: int
    why: str


def size_of(spec: ProgramSpec, nodes: int | None, ranks_per_node: int | None, on: str, environ: Mapping[str, str] = os.environ,
            place: Callable[[str], Where] = decide, facts: Callable[[ProgramSpec], ClusterFacts] = ask_cluster,
            gpus: Callable[[], int] = lambda: len(find_gpus())) -> ProgramSize:
    """Return the size of a program.

    Args:
        spec: the job, as far as known: its partition, its device.
        nodes, ranks_per_node: values from the command line; None if not given.
        on: the requested back end.
        place, facts, gpus: functions that return the back end, the cluster's facts, and the number of GPUs of this machine.
    """
    if nodes is not None and ranks_per_node is not None:
        return ProgramSize(nodes, ranks_per_node, "")
    where = place(on).place
    if where == "step":
        allocation = allocated_tasks(environ)
        ranks, why = _allocated_ranks(allocation, spec)
        return ProgramSize(nodes or allocation.nodes, ranks_per_node or ranks,
                           f"{counted(allocation.nodes, 'node')} of the allocation, {why}")
    if ranks_per_node is not None:
        return ProgramSize(nodes or 1, ranks_per_node, "1 node")
    count = 0
    if spec.job.device != "cpu":
        partition = facts(spec).partition if where == "slurm" else None
        count = gpus() if where != "slurm" else max((kind.gpu_count for kind in partition.kinds), default=0) if partition else 0
    owner = "the partition's nodes" if where == "slurm" else "this machine"
    why = f"a rank per GPU of {owner}" if count else "one rank per node, as no GPU is known"
    return ProgramSize(nodes or 1, max(1, count), why)


def _allocated_ranks(allocation: AllocatedTasks, spec: ProgramSpec) -> tuple[int, str]:
    if allocation.tasks_per_node:
        return allocation.tasks_per_node, "as many ranks as it has tasks on a node"
    if allocation.gpus_per_node and spec.job.device != "cpu":
        return allocation.gpus_per_node, "a rank per GPU"
    return 1, "one rank per node, as it says neither tasks nor GPUs"
