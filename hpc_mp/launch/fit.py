"""Detection of jobs that can never start: the request is compared with the partition's limits and the hardware of its nodes.

Slurm accepts many jobs that no node can run, and lets them wait for ever. A job is refused only if no change in the queue can
help: a node that is busy or down counts like any other, and facts that Slurm does not report are no limit.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpc_mp.base.command import Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted, memory_size, shown
from hpc_mp.cluster.slurm.jobs import SlurmJob
from hpc_mp.cluster.slurm.limits import PartitionLimits, seconds
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.slurm.query import NodeKind
from hpc_mp.job import AnySpec
from hpc_mp.job.sweep import runs_of
from hpc_mp.job.values import seconds_of
from hpc_mp.launch.facts import ClusterFacts, ask_cluster
from hpc_mp.launch.render.values import JobComponent, one_thread_per_core, parts
from hpc_mp.planner.device import Device, Pool

UNSTARTABLE = frozenset({"PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"})
UNSET_MEMORY = 2**20  # Slurm's RealMemory for nodes without a configured value: 1 MB
UNITS = {"K": 2**10, "": 2**20, "M": 2**20, "G": 2**30, "T": 2**40}  # of --mem; without a unit in megabytes


@dataclass(frozen=True, slots=True)
class NodeNeed:
    """A requirement on every node of the job."""

    value: str  # the key of the job, as the user wrote it
    amount: int  # the amount on each node
    of: Callable[[NodeKind], int | None]  # returns the amount that a kind of nodes has; None if Slurm does not report it
    words: Callable[[int], str]  # formats an amount
    remedy: Callable[[int], str]  # returns the remedy, for the largest amount that enough nodes have
    sum: str = ""  # the derivation of the amount


def check_fit(spec: AnySpec, facts: ClusterFacts) -> None:
    """Refuse a job that Slurm would never start. If a job names several partitions, one that could run it is enough. GPUs count
    once it is known that ranks compute on them. Raises HpcMpError if no partition of the job has the nodes, CPUs, GPUs, memory or
    time, or a sweep has more runs than Slurm takes as one array."""
    if facts.most_elements is not None and (runs := len(runs_of(spec.sweep))) > facts.most_elements:
        raise HpcMpError("[sweep]", f"has {counted(runs, 'run')}, and this Slurm takes arrays of {facts.most_elements:,} jobs at "
                         "most (MaxArraySize)", "make several sweeps of it")
    if "clusters" in spec.slurm.extra:  # the facts are of another cluster
        return
    by_name = {limit.partition.name: limit for limit in facts.limits}
    default = facts.partition.name if facts.partition is not None and not facts.rerouted else None
    for number, part in enumerate(parts(spec, facts)):
        names = part.partition.split(",") if part.partition is not None else [default]
        limits = [by_name.get(name) if name is not None else None for name in names]
        refusals = [None if limit is None else _refusal(spec, part, number, limit) for limit in limits]
        if all(refusals):
            raise next(filter(None, refusals))


def never_starts(job: SlurmJob, spec: AnySpec, ask: Runner = ask) -> SlurmJob:
    """Return a job that waits because its partition can never run it, with the one requirement that is too high. ``spec``: the
    job of its run, with every choice made."""
    if not job.waits or job.reason.split(",")[0] not in UNSTARTABLE:
        return job
    try:
        check_fit(spec, ask_cluster(spec, ask=ask))
    except HpcMpError as error:
        return replace(job, meaning=error.rule, remedy=f"cancel it and launch again with another "
                                                        f"{error.value.partition(' = ')[0]}: {error.remedy}")
    return job


def with_node_memory(device: Device, spec: AnySpec, facts: ClusterFacts, nodes: Sequence[int]) -> Device:
    """Return the device with the memory of its nodes, if they are in one partition and Slurm counts their memory. ``nodes``: the
    node of every rank."""
    if device.kind != "cpu" or device.pools or facts.partition is None or spec.slurm.components:
        return device
    (part,), name = parts(spec, facts), facts.partition.name
    largest = max((kind.memory for kind in facts.partition.kinds), default=0)
    hidden = any(limit.partition.name == name and _hidden(limit) for limit in facts.limits)
    request = _memory(part, spec.job.ranks_per_node * (part.cpus or 1))
    if largest <= UNSET_MEMORY or hidden:
        return device
    size = largest if request is None else min(largest, request[1])
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    return replace(device, pools=tuple(Pool(f"a node of partition {name}", size, tuple(ranks)) for ranks in by_node.values()))


def _hidden(limits: PartitionLimits) -> bool:
    """Return True if the partition has nodes that we cannot see, so that their hardware is unknown."""
    return limits.total > sum(len(kind.nodes) for kind in limits.partition.kinds)


def _refusal(spec: AnySpec, part: JobComponent, number: int, limits: PartitionLimits) -> HpcMpError | None:
    """Return the reason why this partition can never run a part of the job; None if it can."""
    value = f"slurm.components[{number}].nodes = {part.nodes}" if spec.slurm.components else f"job.nodes = {part.nodes}"
    refusal = _count_refusal(value, spec, part, limits) or _time_refusal(spec, part, limits)
    if refusal is not None or _hidden(limits):
        return refusal
    return next(_need_refusals(value, _needs(spec, part, limits), part, limits), None)


def _count_refusal(value: str, spec: AnySpec, part: JobComponent, limits: PartitionLimits) -> HpcMpError | None:
    name, request = limits.partition.name, f"{counted(part.nodes, 'node')} asked, the partition"
    own_qos = spec.slurm.qos is not None  # it may lift the partition's limits, as only Slurm knows
    if part.nodes > limits.total:
        return HpcMpError(value, f"{request} has {limits.total}",
                          f"use {limits.total} or fewer, or another partition than {name} (slurm.partition)")
    remaining = limits.total - len(_excluded(part, limits))
    if part.nodes > remaining:
        return HpcMpError(value, f"{request} has {limits.total}, of which slurm.extra.exclude leaves {remaining}",
                          f"use {remaining} or fewer, exclude fewer, or use another partition than {name}")
    if limits.max_nodes is not None and part.nodes > limits.max_nodes and not own_qos:
        return HpcMpError(value, f"{request} gives a job at most {limits.max_nodes} (MaxNodes of {name})",
                          f"use {limits.max_nodes} or fewer, or another slurm.partition")
    if limits.min_nodes is not None and part.nodes < limits.min_nodes and not own_qos:
        return HpcMpError(value, f"{request} takes no job of fewer than {limits.min_nodes} (MinNodes of {name})",
                          f"use {limits.min_nodes} or more, or another slurm.partition")
    return None


def _time_refusal(spec: AnySpec, part: JobComponent, limits: PartitionLimits) -> HpcMpError | None:
    limit, request = limits.partition.time_limit, seconds_of(spec.job.time_limit)
    if limit is None or spec.slurm.qos is not None or "time-min" in part.extra:
        return None
    if request is not None and request <= seconds(limit):
        return None
    problem = "is no limit at all, and" if request is None else "is longer than it may be:"
    return HpcMpError(f"job.time_limit = {shown(spec.job.time_limit)}",
                      f"{problem} a job of partition {limits.partition.name} has at most {limit}",
                      f'write "{limit}" or less, or use another slurm.partition; slurm.chain carries on in further jobs')


def _need_refusals(value: str, needs: Sequence[NodeNeed], part: JobComponent, limits: PartitionLimits) -> Iterator[HpcMpError]:
    """Yield requirements that too few nodes meet; then those that enough nodes meet separately, but too few together."""
    name, nodes, left_out = limits.partition.name, part.nodes, _excluded(part, limits)
    usable = [kind for kind in limits.partition.kinds for node in kind.nodes if node not in left_out]
    for need in needs:
        amounts = sorted((_has(need, kind) for kind in usable), reverse=True)
        enough = sum(amount >= need.amount for amount in amounts)
        if enough < nodes:
            lack = f"the nodes of partition {name} have at most {need.words(amounts[0])}" if not enough else \
                   f"only {enough} of partition {name} {'have' if enough > 1 else 'has'} that, and {counted(nodes, 'node')} asked"
            yield HpcMpError(need.value, f"needs {need.words(need.amount)} on each node{need.sum}, and {lack}",
                             need.remedy(amounts[nodes - 1]))
    fitting = sum(all(_has(need, kind) >= need.amount for need in needs) for kind in usable)
    if fitting < nodes:
        all_words = " and ".join(need.words(need.amount) for need in needs)
        yield HpcMpError(value, f"needs nodes with {all_words}, and partition {name} has {fitting} of them",
                         f"use {fitting} or fewer, ask less of each node, or use another slurm.partition" if fitting
                         else "ask less of each node, or use another slurm.partition")


def _needs(spec: AnySpec, part: JobComponent, limits: PartitionLimits) -> list[NodeNeed]:
    ranks, elsewhere = spec.job.ranks_per_node, "or use another slurm.partition"
    ranks_value = f"job.ranks_per_node = {ranks}"
    cpus_set = any("cpus-per-task" in extra
                   for extra in (spec.slurm.extra, *(component.extra for component in spec.slurm.components)))
    per_rank = part.cpus if cpus_set and part.cpus is not None else 1
    threads = limits.threads_per_core if one_thread_per_core(spec) else 1
    needs = []
    if not part.extra.get("overcommit"):
        total = ", one for each rank" if per_rank == 1 else f", ranks_per_node({ranks}) × cpus-per-task({per_rank})"
        needs.append(NodeNeed(
            ranks_value, ranks * per_rank, lambda kind: kind.cpus // threads, lambda cpus: f"{counted(cpus, 'CPU')}",
            lambda limit: f"use {limit // per_rank} or fewer, on more nodes, {elsewhere}" if limit >= per_rank
            else f"lower slurm.extra.cpus-per-task = {per_rank} to {limit} or less, {elsewhere}", total))
    counted_here = any(kind.gpus for kind in limits.partition.kinds)  # without any, ``slurm_gpus`` handles it
    if counted_here and part.gpus is not None and spec.job.device == "cuda" and spec.slurm.gpu_request != "auto":
        gpu_type = spec.slurm.gpu_type
        needs.append(NodeNeed(
            ranks_value, ranks, lambda kind: _gpus(kind, gpu_type), lambda gpus: f"{gpus} GPU{'s' * (gpus != 1)}",
            lambda limit: f"use {limit} or fewer, on more nodes, {elsewhere}" if limit else f"use fewer nodes, {elsewhere}"))
    memory = _memory(part, ranks * per_rank)
    if memory is not None:
        key, amount = memory
        needs.append(NodeNeed(
            f"slurm.extra.{key} = {shown(part.extra[key])}", amount,
            lambda kind: kind.memory if kind.memory > UNSET_MEMORY else None, memory_size,
            lambda limit: f"write {limit // 2**20 // (1 if key == 'mem' else ranks * per_rank)} or less, in MB, {elsewhere}"))
    return needs


def _has(need: NodeNeed, kind: NodeKind) -> int:
    """Return the amount that a kind of nodes has; an unknown amount is no limit."""
    amount = need.of(kind)
    return need.amount if amount is None else amount


def _gpus(kind: NodeKind, gpu_type: str | None) -> int:
    """Return the GPUs of ``gpu_type`` or of no named type; without ``gpu_type``, the largest number of one type."""
    return max((count for name, count in kind.gpus if gpu_type is None or name in (None, gpu_type)), default=0)


def _memory(part: JobComponent, cpus: int) -> tuple[str, int] | None:
    """Return the option that requests memory, and the requested bytes per node; None if all of a node's is taken."""
    for key, times in (("mem", 1), ("mem-per-cpu", cpus)):
        match = re.fullmatch(r"(\d+)([KMGT]?)B?", str(part.extra.get(key, "")).upper())
        if match and int(match[1]):
            return key, int(match[1]) * UNITS[match[2]] * times
    return None


def _excluded(part: JobComponent, limits: PartitionLimits) -> set[str]:
    text = str(part.extra.get("exclude", ""))
    if "/" in text:  # a file with the names
        return set()
    return {node for kind in limits.partition.kinds for node in kind.nodes} & set(expand(text))
