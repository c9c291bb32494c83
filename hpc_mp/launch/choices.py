"""Choices that a job file leaves to the machine or the cluster: device, form of the GPU request, avoided nodes, profile.

Pure functions: facts in, choices with their reasons out. The order of the ranks is the planner's choice.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.cluster.bad_nodes import BadNode, choose
from hpc_mp.cluster.slurm.nodelist import compress, expand
from hpc_mp.cluster.slurm.nodes import NodeState
from hpc_mp.cluster.slurm.query import SlurmPartition
from hpc_mp.environment.profiles import load_profile
from hpc_mp.environment.view import AUTO, NONE
from hpc_mp.job import AnySpec
from hpc_mp.job.resolution import ResolvedKey
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.planner.device import Asked, Device
from hpc_mp.rundir import RunDirectory

FORM, TYPE, EXCLUDE, PROFILE = "slurm.gpu_request", "slurm.gpu_type", "slurm.extra.exclude", "environment.profile"

# Sites' names of GPU slices: 1g.10gb, a100_3g.20gb, nvidia_a100_3g.20gb, 1g.10gb.me, mig-3g, mig_1g10gb.
MIG = re.compile(r"(^|[_-])mig([_-]|$)|(^|[_-])\d+g\.\d+gb", re.IGNORECASE)
WITHOUT_TRES = frozenset({"select/cons_res", "select/linear"})  # know --gres, not --gpus-per-node


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """The ranks' device, and the form in which it is requested from Slurm. ``device``: the device, with its memory if known.
    ``form``: the value of ``slurm.gpu_request``, with its reason. ``type``: the value of ``slurm.gpu_type``."""

    device: Device
    form: ResolvedKey[str]
    type: ResolvedKey[str | None]


def as_given(spec: AnySpec, device: Device) -> GpuRequest:
    """Return the job's own values, if Slurm is not asked for GPUs or does not answer."""
    return GpuRequest(device, ResolvedKey(FORM, spec.slurm.gpu_request), ResolvedKey(TYPE, spec.slurm.gpu_type))


def slurm_gpus(spec: AnySpec, facts: ClusterFacts) -> GpuRequest:
    """Decide ``device``, ``gpu_request`` and ``gpu_type`` by the job's partition; keep the job's own values if it is unknown.

    A partition whose nodes list GPUs gives ``cuda`` and the request form that the site's Slurm supports, with the type if the
    site names one. A partition without GPUs gives ``cpu`` and ``none``. Some sites with GPUs do not count them; the job must then
    set ``device = "cuda"``. Raises HpcMpError if the partition does not exist, or has only slices of GPUs, no GPUs of the
    requested type, too few per node, or several types of which the job names none.
    """
    partition = facts.partition
    if facts.silence is not None:
        return as_given(spec, Device(spec.job.device, f"partitions unknown: {facts.silence}; launch where `sinfo` answers"
                                         + (", or set job.device" if spec.job.device == "auto" else "")))
    if facts.unknown_partition is not None:
        name, names = facts.unknown_partition, facts.partition_names
        key = "slurm.partition" if name in (spec.slurm.partition or "").split(",") else "slurm.components: partition"
        raise HpcMpError(f"{key} = {name!r}", f"is no partition of this cluster, which shows {', '.join(names) or 'none'}",
                         did_you_mean(name, names, "choose one of these"))
    if partition is None:
        return as_given(spec, Device(spec.job.device, "as the partition has it"))
    counted = any(kind.gpus for kind in partition.kinds)
    device: Asked = ("cuda" if counted else "cpu") if spec.job.device == "auto" else spec.job.device
    why = "as the partition has it" if spec.job.device == "auto" else "as asked"
    if device == "cuda" and not counted:
        _check_uncounted(spec, facts, partition)
        why = "as asked; the partition lists no GPU"
    form = _form(spec, facts, counted)
    chosen = ResolvedKey(TYPE, spec.slurm.gpu_type)
    if counted and device == "cuda" and form.value != "none":
        chosen = ResolvedKey(TYPE, _gpu_type(spec, partition), f"what partition {partition.name} has")
    return GpuRequest(Device(device, why, gpu=chosen.value), form, chosen)


def _form(spec: AnySpec, facts: ClusterFacts, counted: bool) -> ResolvedKey[str]:
    if spec.slurm.gpu_request != "auto":
        return ResolvedKey(FORM, spec.slurm.gpu_request)
    if not counted:
        return ResolvedKey(FORM, "none", "the nodes of the partition list no GPUs")
    if facts.select in WITHOUT_TRES:
        return ResolvedKey(FORM, "gres", f"{facts.select} knows no --gpus-per-node")
    return ResolvedKey(FORM, "gpus-per-node", "the nodes of the partition list GPUs")


def _check_uncounted(spec: AnySpec, facts: ClusterFacts, partition: SlurmPartition) -> None:
    """Refuse GPUs of a partition that lists none, unless the whole site lists none. Raises HpcMpError."""
    slurm, where = spec.slurm, f"partition {partition.name} lists no GPU"
    elsewhere = ", ".join(facts.gpu_partitions)
    choose = f"choose slurm.partition = {elsewhere}, which lists GPUs" if elsewhere else "choose a partition that lists GPUs"
    if slurm.gpu_request not in ("auto", "none") or slurm.gpu_type is not None:
        key = f"gpu_request = {slurm.gpu_request!r}" if slurm.gpu_request != "auto" else f"gpu_type = {slurm.gpu_type!r}"
        raise HpcMpError(f"slurm.{key}", f"asks Slurm for GPUs, and {where}: it would never start",
                         f'{choose}, or job.device = "cpu"')
    if slurm.gpu_request == "auto" and elsewhere:
        raise HpcMpError("job.device = 'cuda'", f"{where}, and Slurm counts those of {elsewhere}",
                         f'{choose}, or job.device = "cpu"; where this partition has GPUs that Slurm does not count, set '
                         'slurm.gpu_request = "none"')


def _gpu_type(spec: AnySpec, partition: SlurmPartition) -> str | None:
    """Return the type to request; None if the site names none, or if the job's constraint or nodes determine it."""
    counts: dict[str | None, int] = {}
    for kind in partition.kinds:
        for name, count in kind.gpus:
            counts[name] = max(count, counts.get(name, 0))
    whole = {name: count for name, count in counts.items() if name is None or not MIG.search(name)}
    where, requested = f"partition {partition.name}", spec.slurm.gpu_type
    shown = ", ".join(f"{name or 'of no type'} ({count} per node)" for name, count in counts.items())
    if not whole or (requested and MIG.search(requested)):
        raise HpcMpError(f"slurm.gpu_type = {requested!r}" if requested else f"{where} with GPUs {shown}",
                         "is a slice of a GPU (MIG), and slices cannot talk to each other",
                         "choose a partition or a type of whole GPUs")
    if requested and requested not in whole and None not in whole:
        raise HpcMpError(f"slurm.gpu_type = {requested!r}", f"is not in {where}, which has {shown}",
                         did_you_mean(requested, filter(None, whole), "choose one of these, or another partition"))
    constrained = spec.slurm.constraint or spec.slurm.components or {"nodelist", "nodefile"} & spec.slurm.extra.keys()
    if not requested and len(whole) > 1 and not constrained:
        raise HpcMpError(where, f"has GPUs of several types: {shown}; ranks of one job need equal ones",
                         "set slurm.gpu_type to one of them")
    count = whole.get(requested, max(whole.values()))
    if count < spec.job.ranks_per_node:
        raise HpcMpError(f"job.ranks_per_node = {spec.job.ranks_per_node}",
                         f"needs as many GPUs on each node; {where} has {shown}", f"use {count} or fewer, on more nodes")
    return requested or (next(iter(whole)) if len(whole) == 1 else None)


def avoid(spec: AnySpec, facts: ClusterFacts, bad: Mapping[str, BadNode]) -> ResolvedKey[str | None]:
    """Return ``slurm.extra.exclude`` with the nodes that failed recently, if enough others exist; None keeps the job's own value.
    Nodes outside of the job's partition are ignored. Nodes that the user names are never excluded. ``bad``: findings that have
    not expired, by node."""
    usable = [node for kind in facts.partition.kinds for node in kind.nodes] if facts.partition else []
    states = {node: NodeState("down" if node in facts.out_of_service else "idle") for node in usable}
    excluded, requested = (list(expand(str(spec.slurm.extra.get(option, "")))) for option in ("exclude", "nodelist"))
    findings = [bad[node] for node in states if node in bad and node not in (*excluded, *requested)]
    if facts.allocation is not None:  # the job has these nodes, even if they failed recently
        findings = [finding for finding in findings if finding.node in facts.allocation]
        return ResolvedKey(EXCLUDE, None, f"not avoided, as this allocation has them: {_against(findings)}" if findings else "")
    if not findings:
        return ResolvedKey(EXCLUDE, None)
    keeping = choose(findings, excluded, states, spec.job.nodes)
    remaining = len(set(usable) - set(excluded) - set(keeping.nodes) - {finding.node for finding in keeping.taken_back}
                    - facts.out_of_service)
    groups = {"avoided": keeping.excluded, f"not avoided, as only {remaining} other nodes are there": keeping.taken_back}
    why = "; ".join(f"{label}: {_against(nodes)}" for label, nodes in groups.items() if nodes)
    return ResolvedKey(EXCLUDE, compress([*excluded, *keeping.nodes]) if keeping.excluded else None, why)


def spare(nodes: Sequence[BadNode]) -> ResolvedKey[str | None]:
    """Return the choice to avoid no nodes, for a job that could not start on the others."""
    return ResolvedKey(EXCLUDE, None, f"not avoided, as the job could not start on the others: {_against(nodes)}")


def _against(nodes: Sequence[BadNode]) -> str:
    return "; ".join(f"{finding.node} ({finding.code}: {finding.evidence})" for finding in nodes)


def avoided(spec: AnySpec, chosen: ResolvedKey[str | None], bad: Mapping[str, BadNode]) -> tuple[BadNode, ...]:
    """Return the findings on the nodes that ``avoid`` added to the user's exclusions."""
    users = expand(str(spec.slurm.extra.get("exclude", "")))
    return tuple(bad[node] for node in expand(chosen.value or "") if node not in users)


def choose_profile(spec: AnySpec, noted: str | None) -> ResolvedKey[str | None]:
    """Return the environment profile; without a reason if the job does not mention one. ``noted``: the platform that the doctor
    detected on the cluster's nodes; None if it detected none. Raises HpcMpError if the profile does not exist."""
    requested = spec.environment.profile
    if requested is None:
        return ResolvedKey(PROFILE, None)
    name = {AUTO: noted, NONE: None}.get(requested, requested)
    if name is None:
        return ResolvedKey(PROFILE, None, "none" if requested == NONE
                           else "none (auto: the doctor has noted no platform of this cluster's nodes)")
    try:
        profile = load_profile(name)
    except HpcMpError as error:
        raise HpcMpError(f"environment.profile = {name!r}", error.rule, error.remedy) from None
    source = ", as the doctor saw it on the nodes" if requested == AUTO else ""
    log = RunDirectory.profile_log.name
    summary = f"{name} ({profile.title}{source}). The job's first node applies it, and {log} says what it set and why."
    return ResolvedKey(PROFILE, name, " ".join([summary, *(profile.notes if spec.slurm.container is not None else [])]))
