"""The assignment of layers to stages: contiguous counts that make the most expensive stage as cheap as possible."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm

from hpc_mp.base.errors import HpcMpError


def partition(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Return the number of layers of every stage.

    It is at least 1, except for the first and the last of several stages, which have the embedding and the head and may have no
    layer. The most expensive stage is as cheap as possible. Among such cuts the most even one is taken (least sum of squared
    stage costs), among equally even ones the one with fewer layers in front, where more microbatches are in flight. Raises
    HpcMpError for more stages than layers and ends, or no stage.

    Args:
        costs: cost of each layer, any unit (time, parameters, …).
        stages: number of stages.
        first, last: extra cost of the first and the last stage (embedding, head), in the same unit.
    """
    layers = len(costs)
    if not 1 <= stages <= most_stages(layers):
        raise HpcMpError(f"{stages} pipeline stages for {layers} layers",
                         "every stage but the first and the last needs at least one layer",
                         f"use between 1 and {most_stages(layers)} stages")
    # Whole numbers, so that equal costs are equal and ties are ties.
    exact = [Fraction(cost) for cost in (*costs, first, last)]
    unit = lcm(*(cost.denominator for cost in exact))
    *layer_costs, first_cost, last_cost = (int(cost * unit) for cost in exact)
    before = list(accumulate(layer_costs, initial=0))

    def cost(stage: int, begin: int, end: int) -> int:
        return before[end] - before[begin] + first_cost * (stage == 0) + last_cost * (stage == stages - 1)

    worst, _ = _best(layers, stages, cost, lambda stage, rest: max(stage, rest))
    _, counts = _best(layers, stages, cost, lambda stage, rest: stage * stage + rest if stage <= worst else None)
    return counts


def most_stages(layers: int) -> int:
    """Return the largest number of stages: only the embedding, one layer each, only the head."""
    return layers + 2


def _best(layers: int, stages: int, cost: Callable[[int, int, int], int],
          join: Callable[[int, int], int | None]) -> tuple[int, tuple[int, ...]]:
    """Return the least value over all cuts, with its counts; ``join`` adds a stage's cost to the value of the stages after it.
    Dynamic programme from the last stage: ``tails[begin]`` is the best cut of the layers from ``begin`` on into the stages from
    the present one on. A ``join`` of None forbids the cut."""
    ends = {0, stages - 1} if stages > 1 else set()
    tails: dict[int, tuple[int, tuple[int, ...]]] = {layers: (0, ())}
    for stage in reversed(range(stages)):
        cuts: dict[int, tuple[int, tuple[int, ...]]] = {}
        fewest = 0 if stage in ends else 1
        for begin in range(layers + 1) if stage else (0,):
            joined = ((join(cost(stage, begin, end), value), end) for end, (value, _) in tails.items() if end >= begin + fewest)
            options = [(value, end) for value, end in joined if value is not None]
            if options:
                value, end = min(options)
                cuts[begin] = value, (end - begin, *tails[end][1])
        tails = cuts
    return tails[0]
