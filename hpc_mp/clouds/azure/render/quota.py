"""The vCPUs that a subscription has to grant, by family of sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.offer import Offer
from hpc_mp.clouds.azure.render.options import ClusterPlan


@dataclass(frozen=True, slots=True)
class FamilyQuota:
    """``family``: as ``az vm list-usage`` names it, "" where the catalogue does not know; ``machines``: how many, for what."""

    family: str
    size: str
    vcpus: int
    machines: str


def quotas(plan: ClusterPlan, offer: Offer, server: str | None) -> tuple[FamilyQuota, ...]:
    """One for each family, all machines running; the family of those that train first.

    Args:
        server: size of the machine that is made for CycleCloud itself, if one is.
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
