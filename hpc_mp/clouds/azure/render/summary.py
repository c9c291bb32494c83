"""Summary of a rendered cluster: quota, a job's view of a node, Slurm's configuration, open parameters, unverified facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hpc_mp.base.text import data_rate
from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.offer import Offer
from hpc_mp.clouds.azure.render.notes import notes, unverified
from hpc_mp.clouds.azure.render.options import ClusterPlan
from hpc_mp.clouds.azure.render.parameters import parameters, topology


@dataclass(frozen=True, slots=True)
class AzureSummary:
    """The summary of a cluster.

    Attributes:
        gpus, gpu_model, vcpus, memory_gib, slurm_memory_mib: resources of one node of the partition hpc.
        nics, nic_gbps, network: number of its adapters, Gb/s of one, InfiniBand generation ("" for Ethernet only).
        node_busbw: least GB/s of an all-reduce inside one healthy node; None if unknown.
        network_gbytes: GB/s of all adapters of a node in one direction; None without InfiniBand.
        placement_group: maximum number of machines in the placement group; None without InfiniBand.
        regional_vcpus: vCPUs of all families together, a separate quota of the subscription in the region.
        azure_conf, gres_conf: lines that azslurm writes.
        job: lines for a job file.
        open: parameters that are null and must be chosen before the first start.
    """

    cluster: str
    partition: str
    nodes: int
    sku: str
    image: str | None
    gpus: int
    gpu_model: str
    vcpus: int
    memory_gib: int
    slurm_memory_mib: int
    nics: int
    nic_gbps: int
    network: str
    node_busbw: float | None
    network_gbytes: float | None
    placement_group: int | None
    topology: str
    profile: str
    quota: tuple[FamilyQuota, ...]
    regional_vcpus: int
    azure_conf: tuple[str, ...]
    gres_conf: tuple[str, ...]
    job: tuple[str, ...]
    open: tuple[str, ...]
    notes: tuple[str, ...]
    unverified: tuple[str, ...]


def azure_summary(plan: ClusterPlan, offer: Offer, server: str | None = None) -> AzureSummary:
    """Return the summary of a plan. ``server``: size of the machine created for CycleCloud itself, if any."""
    size, choices = plan.size, plan.choices
    hpc = slurm_lines(choices.name, "hpc", size, choices.nodes, default=True, one_thread=False)
    arrays, asked = [hpc], quotas(plan, offer, server)
    if choices.htc_nodes:
        of_htc = offer.sizes[plan.heads.htc.casefold()]
        arrays.append(slurm_lines(choices.name, "htc", of_htc, choices.htc_nodes, default=False, one_thread=True))
    return AzureSummary(
        cluster=choices.name, partition="hpc", nodes=choices.nodes, sku=size.name, image=plan.image,
        gpus=size.gpus, gpu_model=size.gpu_title, vcpus=size.vcpus, memory_gib=size.memory_gib, slurm_memory_mib=hpc.memory,
        nics=size.nics, nic_gbps=size.rdma_gbps, network=size.rdma, node_busbw=size.busbw or None,
        network_gbytes=size.nics * size.rdma_gbps / 8 or None, placement_group=plan.group if plan.infiniband else None,
        topology=topology(size), profile=size.profile, quota=asked, regional_vcpus=sum(each.vcpus for each in asked),
        azure_conf=tuple(line for each in arrays for line in (each.partition, each.node)),
        gres_conf=tuple(each.gres for each in arrays if each.gres), job=tuple(_job(plan)),
        open=open_parameters(parameters(plan)), notes=notes(plan), unverified=unverified(plan),
    )


def open_parameters(values: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, value in values.items() if value is None)


def _job(plan: ClusterPlan) -> Iterator[str]:
    yield from ("[job]", f"nodes = {plan.choices.nodes}", f"ranks_per_node = {plan.size.gpus or plan.size.numa}")
    yield from ("", "[slurm]", 'partition = "hpc"')
    if plan.size.profile:
        yield from ("", "[environment]", f'profile = "{plan.size.profile}"')


def words(found: AzureSummary) -> Iterator[str]:
    """Yield the summary as lines of text."""
    yield f"{found.cluster}: {found.nodes} × {found.sku} in the partition {found.partition}"
    yield from ("", "Quota to ask for (vCPUs, all machines running)")
    for each in found.quota:
        yield f"  {each.vcpus:>6}  {each.family or _unknown(each.size)}"
        yield f"          {each.machines}"
    yield f"  {found.regional_vcpus:>6}  Total Regional vCPUs (cores): all families together, a quota of its own"
    yield from ("", "What a job sees on a node")
    yield from (f"  {line}" for line in _node(found))
    yield from ("", "What azslurm tells Slurm")
    yield from (f"  azure.conf  {line}" for line in found.azure_conf)
    yield from (f"  gres.conf   {line}" for line in found.gres_conf)
    yield from ("", "Lines for a job file")
    yield from (f"  {line}" if line else "" for line in found.job)
    for title, lines in (("Notes", found.notes), ("Not verified on Azure", found.unverified),
                         ("Open: to be chosen before the first start", found.open)):
        if lines:
            yield from ("", title)
            yield from (f"  {line}" for line in lines)


def _unknown(size: str) -> str:
    return f'family of {size}: az vm list-skus --size {size} --query "[].family"'


def _node(found: AzureSummary) -> Iterator[str]:
    if found.gpus:
        yield f"{found.gpus} × {found.gpu_model}"
    yield f"{found.vcpus} vCPUs, {found.memory_gib} GiB ({found.slurm_memory_mib} MiB for jobs)"
    if found.network_gbytes:
        yield (f"{found.nics} × InfiniBand {found.network} {found.nic_gbps} Gb/s: "
               f"{data_rate(found.network_gbytes)} in each direction")
    else:
        yield "Ethernet alone, no InfiniBand"
    if found.node_busbw:
        yield f"all-reduce in one healthy node: {data_rate(found.node_busbw)} (busbw) or more"
    if found.nodes > 1:
        yield "between nodes: hpc-mp bench all_reduce --nodes 2 says what to expect, and measures it"
    if found.profile:
        yield f"environment profile {found.profile} (hpc-mp env --profile {found.profile})"


@dataclass(frozen=True, slots=True)
class FamilyQuota:
    """The quota of a family. ``family``: name in ``az vm list-usage``, "" if unknown; ``machines``: numbers and roles as text."""

    family: str
    size: str
    vcpus: int
    machines: str


def quotas(plan: ClusterPlan, offer: Offer, server: str | None) -> tuple[FamilyQuota, ...]:
    """Return one quota per family with all machines running; the family of the training machines comes first.

    Args:
        server: size of the machine created for CycleCloud itself, if any.
    """
    wanted: dict[str, list[tuple[MachineType, int, str]]] = {}
    for name, count, role in _machines(plan, server):
        size = offer.sizes[name.casefold()]
        if count:
            wanted.setdefault(size.quota or f"of {size.name}", []).append((size, count, role))
    return tuple(_quota(each) for each in wanted.values())


def _machines(plan: ClusterPlan, server: str | None) -> Iterable[tuple[str, int, str]]:
    yield plan.size.name, plan.choices.nodes, "hpc"
    yield plan.heads.scheduler, 1, "scheduler"
    yield plan.heads.login, plan.choices.login_nodes, "login"
    yield plan.heads.htc, plan.choices.htc_nodes, "htc"
    if server:
        yield server, 1, "CycleCloud"


def _quota(machines: list[tuple[MachineType, int, str]]) -> FamilyQuota:
    sizes = dict.fromkeys(size.name for size, _, _ in machines)
    return FamilyQuota(machines[0][0].quota, ", ".join(sizes), sum(size.quota_vcpus * count for size, count, _ in machines),
                 " + ".join(f"{count} {role} × {size.quota_vcpus}" for size, count, role in machines))


DAMPEN = 5  # per cent of the memory that is reserved: the default of the template and of azslurm
_LEAST_HELD = 1024  # MiB


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a partition in Slurm's configuration. ``memory``: MiB that Slurm can allocate on a node."""

    partition: str
    node: str
    gres: str
    memory: int


def slurm_lines(cluster: str, array: str, size: MachineType, nodes: int, *, default: bool, one_thread: bool) -> Lines:
    """Compute the lines as slurmcc/partition.py and slurmcc/cli.py of Azure/cyclecloud-slurm do.

    Args:
        one_thread: True if slurm.use_pcpu is false: every hardware thread is a separate CPU.
    """
    prefix = re.sub(r"[^a-zA-Z0-9-]", "-", f"{cluster}-{array}-")
    names = f"{prefix}1" if nodes == 1 else f"{prefix}[1-{nodes}]"
    whole = size.memory_gib * 1024
    memory = max(1024, int(whole - max(_LEAST_HELD, whole * DAMPEN / 100)))
    threads = 1 if one_thread else size.threads
    return Lines(
        partition=f"PartitionName={array} Nodes={names} Default={'YES' if default else 'NO'} "
                  f"DefMemPerCPU={memory // size.vcpus} MaxTime=INFINITE State=UP",
        node=f"Nodename={names} Feature=cloud STATE=CLOUD CPUs={size.vcpus} ThreadsPerCore={threads} RealMemory={memory}"
             + (f" Gres=gpu:{size.gpus}" if size.gpus else ""),
        gres=f"Nodename={names} Name=gpu Count={size.gpus} File={_devices(size)}" if size.gpus else "",
        memory=memory,
    )


def _devices(size: MachineType) -> str:
    if size.gpu_vendor == "amd":
        numbers = [str(128 + 8 * at) for at in range(size.gpus)]
        return f"/dev/dri/renderD{numbers[0] if len(numbers) == 1 else '[' + ','.join(numbers) + ']'}"
    return "/dev/nvidia0" if size.gpus == 1 else f"/dev/nvidia[0-{size.gpus - 1}]"
