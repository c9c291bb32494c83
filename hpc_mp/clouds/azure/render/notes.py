"""Notes about a plan for the user, as rows of a table: (condition, text)."""

from __future__ import annotations

from collections.abc import Callable

from hpc_mp.clouds.azure.render.options import ClusterPlan


def _recalled(plan: ClusterPlan) -> str:
    """Return the figures of the size that have no source."""
    recalled = (name for name, source in plan.size.sources.items() if source == "memory" and getattr(plan.size, name))
    return ", ".join(sorted(recalled))


NOTES: tuple[tuple[Callable[[ClusterPlan], object], Callable[[ClusterPlan], str]], ...] = (
    (lambda plan: True,
     lambda plan: "Quota is not capacity. If Azure has no room for a node, CycleCloud shows an allocation failure"
                  + (", even if single machines are available: all nodes of hpc are in one placement group. Try fewer nodes, "
                     "another zone or region, or reserve capacity." if plan.size.rdma else ". Try another size or region.")),
    (lambda plan: plan.image is None,
     lambda plan: f"Azure publishes no image for {plan.size.name}: set HPCImageName to your own, Ubuntu 24.04 for arm64 with the "
                  "drivers of NVIDIA and InfiniBand (the scripts of azhpc-images build one)."),
    (lambda plan: plan.image and plan.entry is None,
     lambda plan: f"{plan.image} is not in the catalogue: hpc-mp cannot check if it fits {plan.size.name}."),
    (lambda plan: plan.size.nvlink_block and plan.choices.nodes % plan.size.nvlink_block,
     lambda plan: f"{plan.choices.nodes} nodes are not a multiple of {plan.size.nvlink_block}, the machines of one NVLink "
                  "domain: the last block is incomplete, and a job across blocks uses InfiniBand."),
    (lambda plan: plan.size.quota_vcpus > plan.size.vcpus,
     lambda plan: f"{plan.size.name} has {plan.size.vcpus} cores but counts as the whole machine: {plan.size.quota_vcpus} vCPUs "
                  "of the quota each."),
    (lambda plan: plan.size.gpus and not plan.size.rdma and plan.choices.nodes > 1,
     lambda plan: f"{plan.size.name} has no InfiniBand: a job on several nodes uses Ethernet, which is many times slower."),
    (lambda plan: plan.size.gpu_vendor == "amd",
     lambda plan: "AMD's GPUs need torch for ROCm: set HpcMpTorchIndex to its package index (pytorch.org, Get Started)."),
    (lambda plan: plan.entry and plan.entry.python,
     lambda plan: f"{plan.image} has Python {plan.entry.python if plan.entry else ''}, and hpc-mp needs 3.11 or later: add one "
                  "to the image, or choose an image of Ubuntu 24.04."),
    (lambda plan: plan.size.retired,
     lambda plan: f"{plan.size.name} is retired on {plan.size.retired}: its machines stop then."),
    (lambda plan: plan.choices.storage == "nfs" and plan.choices.nodes > 8,
     lambda plan: "/shared is one disk of the scheduler: for checkpoints of this many nodes use --storage amlfs or external."),
    (lambda plan: plan.choices.accounting and plan.choices.database is None,
     lambda plan: "Accounting is on and needs a MySQL server that you provide; --no-accounting works without one."),
    (lambda plan: not plan.choices.accounting,
     lambda plan: "Accounting is off: no sacct, no limits, no fair share. hpc-mp does not need it."),
    (_recalled, lambda plan: f"Figures of {plan.size.name} without a source: {_recalled(plan)}."),
    (lambda plan: True,
     lambda plan: "No such cluster has been started on Azure; docs/admin/cyclecloud.md lists what is not verified."),
)


def notes(plan: ClusterPlan) -> tuple[str, ...]:
    return tuple(text(plan) for holds, text in NOTES if holds(plan))
