"""Nodes that have failed lately are left out of a new job, where enough others are there."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_mp.cluster.bad_nodes import BadNode
from hpc_mp.cluster.slurm.nodelist import compress, expand
from hpc_mp.cluster.slurm.query import Partition
from hpc_mp.job import JobSpec


def avoid(spec: JobSpec, partition: Partition | None, bad: Mapping[str, BadNode]) -> tuple[JobSpec, str | None]:
    """The job with those nodes in ``slurm.extra.exclude``, and a sentence about it; unchanged when there are none.

    Args:
        partition: that the job goes to; nodes of others do not matter.
        bad: findings that have not expired, by node.
    """
    usable = [node for kind in partition.kinds for node in kind.nodes] if partition else []
    excluded = list(expand(str(spec.slurm.extra.get("exclude", ""))))
    found = [bad[node] for node in dict.fromkeys(usable) if node in bad and node not in excluded]
    if not found:
        return spec, None
    words = "; ".join(f"{finding.node} ({finding.code}: {finding.evidence})" for finding in found)
    left = len(set(usable) - set(excluded) - {finding.node for finding in found})
    if left < spec.job.nodes:
        return spec, f"not avoided, as only {left} other nodes are there: {words}"
    nodes = compress([*excluded, *(finding.node for finding in found)])
    slurm = spec.slurm.model_copy(update={"extra": {**spec.slurm.extra, "exclude": nodes}})
    return spec.model_copy(update={"slurm": slurm}), f"avoided: {words}"
