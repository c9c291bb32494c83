"""Notes about a plan for the user, as rows of a table: (condition, text)."""

from __future__ import annotations

from collections.abc import Callable

from hpc_mp.clouds.azure.render.options import ClusterPlan

_OLDEST_PYTHON = (3, 11)

Row = tuple[Callable[[ClusterPlan], bool], Callable[[ClusterPlan], str]]


def _old_python(plan: ClusterPlan) -> bool:
    return bool(plan.known and plan.known.python) and _release(plan) < _OLDEST_PYTHON


def _release(plan: ClusterPlan) -> tuple[int, ...]:
    return tuple(int(part) for part in plan.known.python.split(".")) if plan.known else ()


NOTES: tuple[Row, ...] = (
    (lambda plan: True,
     lambda plan: "Quota is not capacity. A node that Azure has no room for shows an allocation failure in CycleCloud"
                  + (", also where single machines can be had: all of hpc are in one placement group. Try fewer nodes, another "
                     "zone or region, or reserve capacity." if plan.infiniband else ". Try another size, zone or region.")),
    (lambda plan: plan.image is None,
     lambda plan: f"Azure publishes no image for {plan.size.name}: give HPCImageName one of your own, Ubuntu 24.04 for arm64 "
                  "with NVIDIA's and InfiniBand's drivers (the scripts of azhpc-images build one)."),
    (lambda plan: bool(plan.image) and plan.known is None,
     lambda plan: f"{plan.image} is not in the catalogue: whether it fits {plan.size.name} was not checked."),
    (lambda plan: bool(plan.size.nvlink_block) and plan.choices.nodes % plan.size.nvlink_block > 0,
     lambda plan: f"{plan.choices.nodes} nodes are no multiple of {plan.size.nvlink_block}, the machines of one NVLink domain: "
                  "the last block stays part-filled, and a job across it goes over InfiniBand."),
    (lambda plan: plan.size.quota_vcpus > plan.size.vcpus,
     lambda plan: f"{plan.size.name} shows {plan.size.vcpus} cores and is counted and paid as the whole machine: "
                  f"{plan.size.quota_vcpus} vCPUs of the quota each."),
    (lambda plan: bool(plan.size.nvlink_block),
     lambda plan: "The scheduler and the login nodes are arm64 too, because the scheduler makes the environment of all nodes."),
    (lambda plan: bool(plan.size.gpus) and not plan.infiniband and plan.choices.nodes > 1,
     lambda plan: f"{plan.size.name} has no InfiniBand: a job on several nodes goes over Ethernet, many times slower."),
    (lambda plan: plan.size.gpu_vendor == "amd",
     lambda plan: "AMD's GPUs need torch for ROCm: set HpcMpTorchIndex to its package index (pytorch.org, Get Started)."),
    (_old_python,
     lambda plan: f"{plan.image} has Python {plan.known.python if plan.known else ''}, and hpc-mp needs 3.11 or later: put one "
                  "into the image, or choose an image of Ubuntu 24.04."),
    (lambda plan: bool(plan.size.retired),
     lambda plan: f"{plan.size.name} is retired on {plan.size.retired}: machines stop then."),
    (lambda plan: plan.choices.storage == "nfs" and plan.choices.nodes > 8,
     lambda plan: "/shared is one disk of the scheduler: for checkpoints of this many nodes take --storage amlfs or external."),
    (lambda plan: plan.choices.accounting and plan.choices.database is None,
     lambda plan: "Accounting is on and wants a MySQL server that you have made; without one: --no-accounting."),
    (lambda plan: not plan.choices.accounting,
     lambda plan: "Accounting is off: no sacct, no limits, no fair share. hpc-mp works without."),
)

UNVERIFIED: tuple[Row, ...] = (
    (lambda plan: True, lambda plan: "this cluster has not been started on Azure"),
    (lambda plan: True,
     lambda plan: "what azslurm writes: computed as the source of cyclecloud-slurm 4.0.9 does, not read from a scheduler"),
    (lambda plan: bool(plan.image), lambda plan: f"drivers and libraries in {plan.image}"),
    (lambda plan: plan.infiniband, lambda plan: f"that Azure grants {plan.group} machines in one placement group"),
    (lambda plan: plan.size.quota_vcpus > plan.size.vcpus,
     lambda plan: "that a quota counts whole machines: seen by users of other sizes with constrained cores"),
    (lambda plan: bool(plan.size.busbw), lambda plan: "the bandwidth in a node: the least that Azure's own health check accepts"),
    (lambda plan: bool(plan.size.nvlink_block), lambda plan: "IMEX, and NVLink between nodes"),
    (lambda plan: bool(plan.size.nvlink_block), lambda plan: "the scheduler on arm64, and PyPI's torch there"),
)


def notes(plan: ClusterPlan) -> tuple[str, ...]:
    return _said(NOTES, plan)


def unverified(plan: ClusterPlan) -> tuple[str, ...]:
    """Return the facts that have not been verified on Azure."""
    figures = [figure for figure, source in plan.size.sources.items() if source == "memory" and getattr(plan.size, figure)]
    recalled = (f"{plan.size.name}: {', '.join(sorted(figures))} (recalled, no source)",) if figures else ()
    return _said(UNVERIFIED, plan) + recalled


def _said(rows: tuple[Row, ...], plan: ClusterPlan) -> tuple[str, ...]:
    return tuple(text(plan) for holds, text in rows if holds(plan))
