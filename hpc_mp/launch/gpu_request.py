"""What a job file leaves to the cluster: the device, and in which form GPUs are asked for."""

from __future__ import annotations

import re

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.cluster.slurm.query import Partition
from hpc_mp.job import JobSpec
from hpc_mp.launch.facts import ClusterFacts

# Names that sites give to slices of a GPU: 1g.10gb, a100_3g.20gb, nvidia_a100_3g.20gb, 1g.10gb.me, mig-3g, mig_1g10gb.
MIG = re.compile(r"(^|[_-])mig([_-]|$)|(^|[_-])\d+g\.\d+gb", re.IGNORECASE)
WITHOUT_TRES = frozenset({"select/cons_res", "select/linear"})  # know --gres, not --gpus-per-node


def settle(spec: JobSpec, facts: ClusterFacts) -> JobSpec:
    """``device``, ``gpu_request`` and ``gpu_type`` decided by the job's partition; unchanged where it is not known.

    A partition whose nodes list GPUs gives ``cuda`` and the form that the site's Slurm knows, with the type where the
    site names one; one without gives ``cpu`` and ``none``. Some sites with GPUs do not count them: there say
    ``device = "cuda"``.

    Raises:
        HpcMpError: there is no such partition; it has slices of GPUs only, no GPUs of the wanted type, too few per node,
            or several types of which the job names none.
    """
    partition = facts.partition
    if facts.unknown_partition is not None:
        raise _no_partition(spec, facts.unknown_partition, facts.partition_names)
    if partition is None:
        return spec
    counted = any(kind.gpus for kind in partition.kinds)
    device = ("cuda" if counted else "cpu") if spec.job.device == "auto" else spec.job.device
    form = spec.slurm.gpu_request
    if form == "auto":
        form = ("gres" if facts.select in WITHOUT_TRES else "gpus-per-node") if counted else "none"
    chosen = spec.slurm.gpu_type
    if counted and device == "cuda" and form != "none":
        chosen = _gpu_type(spec, partition)
    return spec.model_copy(update={"job": spec.job.model_copy(update={"device": device}),
                                   "slurm": spec.slurm.model_copy(update={"gpu_request": form, "gpu_type": chosen})})


def _no_partition(spec: JobSpec, name: str, known: tuple[str, ...]) -> HpcMpError:
    key = "slurm.partition" if name in (spec.slurm.partition or "").split(",") else "slurm.components: partition"
    return HpcMpError(f"{key} = {name!r}", f"is no partition of this cluster, which shows {', '.join(known) or 'none'}",
                      did_you_mean(name, known, "choose one of these"))


def _gpu_type(spec: JobSpec, partition: Partition) -> str | None:
    """The type to ask for; None where the site names none, or the job's constraint or nodes choose."""
    most: dict[str | None, int] = {}
    for kind in partition.kinds:
        for name, count in kind.gpus:
            most[name] = max(count, most.get(name, 0))
    whole = {name: count for name, count in most.items() if name is None or not MIG.search(name)}
    where, wanted = f"partition {partition.name}", spec.slurm.gpu_type
    shown = ", ".join(f"{name or 'of no type'} ({count} per node)" for name, count in most.items())
    if not whole or (wanted and MIG.search(wanted)):
        raise HpcMpError(f"slurm.gpu_type = {wanted!r}" if wanted else f"{where} with GPUs {shown}",
                         "is a slice of a GPU (MIG), and slices cannot talk to each other",
                         "choose a partition or a type of whole GPUs")
    if wanted and wanted not in whole and None not in whole:
        raise HpcMpError(f"slurm.gpu_type = {wanted!r}", f"is not in {where}, which has {shown}",
                         did_you_mean(wanted, filter(None, whole), "choose one of these, or another partition"))
    free = spec.slurm.constraint or spec.slurm.components or {"nodelist", "nodefile"} & spec.slurm.extra.keys()
    if not wanted and len(whole) > 1 and not free:
        raise HpcMpError(where, f"has GPUs of several types: {shown}; ranks of one job need equal ones",
                         "set slurm.gpu_type to one of them")
    count = whole.get(wanted, max(whole.values()))
    if count < spec.job.ranks_per_node:
        raise HpcMpError(f"job.ranks_per_node = {spec.job.ranks_per_node}",
                         f"needs as many GPUs on each node; {where} has {shown}", f"use {count} or fewer, on more nodes")
    return wanted or (next(iter(whole)) if len(whole) == 1 else None)
