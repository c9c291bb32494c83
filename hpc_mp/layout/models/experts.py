"""The distribution of a block's experts over expert ranks, and the ranks that have the same experts. No torch.

An expert group is a block of E neighbours among the data × context ranks at equal pipeline and tensor coordinates. Its ranks
distribute the experts of every block, in order and as ``torch.chunk`` cuts; everything else is held as without expert
parallelism. So D × C / E ranks have the same experts. ZeRO shards the experts' state over as many of these ranks as divide both
their number and the shard degree: over all of them if no shard degree is given.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, gcd

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.layout.models.shape import ModelShape, chunk_sizes


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """An expert rank, and the number of expert ranks. ``shards``: number of ranks with the same experts over which ZeRO shards
    their state."""

    size: int = 1
    rank: int = 0
    shards: int = 1

    def part(self, experts: int) -> slice:
        """Return the experts of this rank."""
        sizes = chunk_sizes(experts, self.size)
        begin = sum(sizes[:self.rank])
        return slice(begin, begin + sizes[self.rank])


ALL_EXPERTS = ExpertCut()


def expert_cut(spec: JobSpec, rank: int = 0) -> ExpertCut:
    """Return the cut of an expert rank of a job; the first rank has the most experts."""
    return ExpertCut(spec.parallel.expert, rank, gcd(spec.shard_degree, spec.state_degree // spec.parallel.expert))


def expert_capacity(factor: float | None, sequence: int, shape: ModelShape) -> int | None:
    """Return how many choices of a sample an expert takes; None: all. The factor is a decimal: 1.1 of 10 is 11, not 12."""
    return None if factor is None else ceil(Fraction(str(factor)) * sequence * shape.experts_per_token / shape.experts)


def check_experts(shape: ModelShape, spec: JobSpec) -> None:
    """Raise HpcMpError, with the arithmetic, if expert ranks would have no experts, or too few, or if router losses or a
    capacity are set for a model without experts."""
    ranks, train = spec.parallel.expert, spec.train
    for key in ("router_balance", "router_z", "expert_capacity"):
        value = getattr(train, key)
        if value and not shape.experts:
            raise HpcMpError(f"train.{key} = {value:g}", f"has no effect: {shape.model_type} has no experts, and so no router",
                             "leave it out")
    if ranks == 1:
        return
    if not shape.experts:
        raise HpcMpError(f"parallel.expert = {ranks}", f"has nothing to share out: {shape.model_type} has no experts",
                         "set parallel.expert = 1")
    sizes = chunk_sizes(shape.experts, ranks)
    if empty := sizes.count(0):
        largest = max(degree for degree in range(1, ranks) if 0 not in chunk_sizes(shape.experts, degree))
        raise HpcMpError(f"parallel.expert = {ranks}", f"cuts the {shape.experts} experts of a block into pieces of "
                         f"{sizes[0]}, so that {empty} ranks of a group get none",
                         f"use {largest}, or another number with an expert for every rank")
