"""Summary of a rendered cluster: quota, the resources of a node, lines for a job file, notes, open parameters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpc_mp.base.assets import asset_table
from hpc_mp.base.grouping import grouped
from hpc_mp.base.text import data_rate
from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.offer import Offer
from hpc_mp.clouds.azure.render.options import ClusterPlan, parameters, topology


class FamilyQuota(NamedTuple):
    """The quota of a family. ``family``: name in ``az vm list-usage``, "" if unknown; ``machines``: numbers and roles as text."""

    family: str
    size: str
    vcpus: int
    machines: str


@dataclass(frozen=True, slots=True)
class AzureSummary:
    """The summary of a plan; the quota of the training machines comes first."""

    plan: ClusterPlan
    quota: tuple[FamilyQuota, ...]

    @property
    def open(self) -> tuple[str, ...]:
        """The parameters that are null and must be chosen before the first start."""
        return tuple(name for name, value in parameters(self.plan).items() if value is None)

    @property
    def job(self) -> tuple[str, ...]:
        """The lines for a job file."""
        size = self.plan.size
        profile = ("", "[environment]", f'profile = "{size.profile}"') if size.profile else ()
        return ("[job]", f"nodes = {self.plan.choices.nodes}", f"ranks_per_node = {size.gpus or size.numa}",
                "", "[slurm]", 'partition = "hpc"', *profile)

    @property
    def regional_vcpus(self) -> int:
        """The vCPUs of all families together, a separate quota of the subscription in the region."""
        return sum(quota.vcpus for quota in self.quota)

    def document(self) -> dict[str, Any]:
        """Return the JSON form. ``node_busbw`` and ``network_gbytes`` are GB/s, ``nic_gbps`` Gb/s; null if unknown or absent."""
        plan, size = self.plan, self.plan.size
        return {
            "cluster": plan.choices.name, "partition": "hpc", "nodes": plan.choices.nodes, "sku": size.name, "image": plan.image,
            "gpus": size.gpus, "gpu_model": size.gpu_title, "vcpus": size.vcpus, "memory_gib": size.memory_gib,
            "slurm_memory_mib": slurm_memory(size), "nics": size.nics, "nic_gbps": size.rdma_gbps, "network": size.rdma,
            "node_busbw": size.busbw or None, "network_gbytes": size.nics * size.rdma_gbps / 8 or None,
            "placement_group": plan.group if size.rdma else None, "topology": topology(size), "profile": size.profile,
            "quota": [quota._asdict() for quota in self.quota], "regional_vcpus": self.regional_vcpus,
            "job": self.job, "open": self.open, "notes": notes(plan),
        }

    def words(self) -> Iterator[str]:
        """Yield the summary as lines of text."""
        yield f"{self.plan.choices.name}: {self.plan.choices.nodes} × {self.plan.size.name} in the partition hpc"
        yield from ("", "Quota to request (vCPUs, all machines running)")
        for family, size, vcpus, machines in self.quota:
            unknown = f'family of {size}: az vm list-skus --size {size} --query "[].family"'
            yield from (f"  {vcpus:>6}  {family or unknown}", f"          {machines}")
        yield f"  {self.regional_vcpus:>6}  Total Regional vCPUs (cores): all families together, a separate quota"
        for title, lines in (("Resources of a node", tuple(_node(self.plan))), ("Lines for a job file", self.job),
                             ("Notes", notes(self.plan)), ("To choose before the first start", self.open)):
            yield from ("", title, *(f"  {line}" if line else "" for line in lines)) if lines else ()


def azure_summary(plan: ClusterPlan, offer: Offer, server: str | None = None) -> AzureSummary:
    """Return the summary of a plan. ``server``: size of the machine created for CycleCloud itself, if any."""
    roles = ((plan.size.name, plan.choices.nodes, "hpc"), (plan.heads["scheduler"], 1, "scheduler"),
             (plan.heads["login"], plan.choices.login_nodes, "login"), (plan.heads["htc"], plan.choices.htc_nodes, "htc"),
             (server or "", 1, "CycleCloud"))
    machines_of = [(offer.sizes[name.casefold()], count, role) for name, count, role in roles if name and count]
    families = grouped((size.quota or f"of {size.name}", (size, count, role)) for size, count, role in machines_of)
    return AzureSummary(plan, tuple(
        FamilyQuota(machines[0][0].quota, ", ".join(dict.fromkeys(size.name for size, _, _ in machines)),
                    sum(size.quota_vcpus * count for size, count, _ in machines),
                    " + ".join(f"{count} {role} × {size.quota_vcpus}" for size, count, role in machines))
        for machines in families.values()))


def _node(plan: ClusterPlan) -> Iterator[str]:
    size = plan.size
    if size.gpus:
        yield f"{size.gpus} × {size.gpu_title} (Gres=gpu:{size.gpus})"
    yield f"{size.vcpus} vCPUs, {size.memory_gib} GiB (CPUs={size.vcpus}, RealMemory={slurm_memory(size)})"
    rate = data_rate(size.nics * size.rdma_gbps / 8)
    yield (f"{size.nics} × InfiniBand {size.rdma} {size.rdma_gbps} Gb/s: {rate} in each direction" if size.rdma
           else "Ethernet only, no InfiniBand")
    if size.busbw:
        yield f"all-reduce in one healthy node: {data_rate(size.busbw)} (busbw) or more"
    if plan.choices.nodes > 1:
        yield "between nodes: hpc-mp bench all_reduce --nodes 2 predicts the bandwidth and measures it"
    if size.profile:
        yield f"environment profile {size.profile} (hpc-mp env --profile {size.profile})"


def slurm_memory(size: MachineType) -> int:
    """Return the MiB that Slurm can allocate on a node: azslurm reserves 5 per cent, and 1 GiB at least."""
    total = size.memory_gib * 1024
    return max(1024, int(total - max(1024, total * 5 / 100)))


def _recalled(plan: ClusterPlan) -> str:
    recalled = (name for name, source in plan.size.sources.items() if source == "memory" and getattr(plan.size, name))
    return ", ".join(sorted(recalled))


# Notes for the user: the condition of each text of ``cyclecloud/notes.toml``.
NOTES: dict[str, Callable[[ClusterPlan], object]] = {
    "one-group": lambda plan: plan.size.rdma,
    "no-group": lambda plan: not plan.size.rdma,
    "no-image": lambda plan: plan.image is None,
    "unknown-image": lambda plan: plan.image and plan.entry is None,
    "incomplete-block": lambda plan: plan.size.nvlink_block and plan.choices.nodes % plan.size.nvlink_block,
    "whole-machine": lambda plan: plan.size.quota_vcpus > plan.size.vcpus,
    "ethernet": lambda plan: plan.size.gpus and not plan.size.rdma and plan.choices.nodes > 1,
    "rocm": lambda plan: plan.size.gpu_vendor == "amd",
    "old-python": lambda plan: plan.entry and plan.entry.python,
    "retired": lambda plan: plan.size.retired,
    "one-disk": lambda plan: plan.choices.storage == "nfs" and plan.choices.nodes > 8,
    "database": lambda plan: plan.choices.accounting and plan.choices.database is None,
    "no-accounts": lambda plan: not plan.choices.accounting,
    "recalled": _recalled,
    "unverified": lambda plan: True,
}


def notes(plan: ClusterPlan) -> tuple[str, ...]:
    texts = asset_table("cyclecloud/notes.toml")
    return tuple(texts[name].format(plan=plan, recalled=_recalled(plan)) for name, holds in NOTES.items() if holds(plan))
