"""The distribution of a block's experts over expert ranks, and the ranks that have the same experts. No torch.

An expert group is a block of E neighbours among the data × context ranks at equal pipeline and tensor coordinates. Its ranks
distribute the experts of every block, in order and as ``torch.chunk`` cuts; everything else is held as without expert
parallelism. So D × C / E ranks have the same experts. ZeRO shards the experts' state over as many of these ranks as divide both
their number and the shard degree: over all of them if no shard degree is given.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from hpc_mp.layout.models.shape import ModelShape, chunk


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """An expert rank, and the number of expert ranks. ``shards``: number of ranks with the same experts over which ZeRO shards
    their state."""

    size: int = 1
    rank: int = 0
    shards: int = 1

    def part(self, experts: int) -> slice:
        """Return the experts of this rank."""
        return chunk(experts, self.size, self.rank)


ALL_EXPERTS = ExpertCut()


FILLED = Fraction(3, 2)  # rows for each choice, with those of no choice, up to which ranks of the expert axis fill rows up


def expert_slots(limit: int | None, tokens: int, choices: int, experts: int) -> int | None:
    """Return how many rows an expert of another rank gets of a rank's tokens, with rows of no choice; None: as many as chose it.

    Args:
        limit: number of these choices that an expert takes at most; None: all.
        tokens, choices: number of the rank's tokens, and of the choices of each.
    """
    slots = tokens if limit is None else min(limit, tokens)
    return slots if limit is not None and slots * experts <= FILLED * tokens * choices else None


def expert_capacity(factor: float | None, sequence: int, shape: ModelShape) -> int | None:
    """Return how many choices of a sample an expert takes; None: all. The factor is a decimal: 1.1 of 10 is 11, not 12."""
    return None if factor is None else ceil(Fraction(str(factor)) * sequence * shape.experts_per_token / shape.experts)
