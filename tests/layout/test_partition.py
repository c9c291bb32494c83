"""Layers to stages: the exact partition against brute force."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.schedule import partition


def stage_costs(costs: list[float], counts: tuple[int, ...], first: float, last: float) -> list[Fraction]:
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    found = [sum(map(Fraction, costs[begin:end]), Fraction(0)) for begin, end in pairwise(ends)]
    found[0] += Fraction(first)
    found[-1] += Fraction(last)
    return found


def brute_force(costs: list[float], stages: int, first: float, last: float) -> tuple[int, ...]:
    cuts = [(0, *inner, len(costs)) for inner in combinations(range(len(costs) + 1), stages - 1)]
    counts = [tuple(b - a for a, b in pairwise(cut)) for cut in cuts]

    def key(candidate: tuple[int, ...]) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        each = stage_costs(costs, candidate, first, last)
        return max(each), sum((cost * cost for cost in each), Fraction(0)), candidate

    return min(counts, key=key)


costs_of_layers = st.one_of(st.integers(0, 4).map(float), st.floats(0, 100, allow_nan=False))


@given(st.data(), st.lists(costs_of_layers, min_size=1, max_size=9), costs_of_layers, costs_of_layers)
def test_equals_brute_force(data: st.DataObject, costs: list[float], first: float, last: float) -> None:
    stages = data.draw(st.integers(1, len(costs) + 2))
    assert partition(costs, stages, first, last) == brute_force(costs, stages, first, last)


@pytest.mark.parametrize(("layers", "stages", "counts"), [
    (8, 4, (2, 2, 2, 2)), (7, 3, (2, 2, 3)), (3, 3, (1, 1, 1)), (5, 1, (5,)), (10, 4, (2, 2, 3, 3)),
])
def test_equal_layers(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    assert partition([0.1] * layers, stages) == counts  # 0.1: sums of floats must not break ties


@pytest.mark.parametrize("stages", [0, 7])
def test_more_stages_than_layers_and_ends_are_refused(stages: int) -> None:
    with pytest.raises(HpcMpError, match=f"{stages} pipeline stages for 4 layers"):
        partition([1.0] * 4, stages)
