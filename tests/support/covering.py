"""Covers: few cases of many, such that whatever fact any case shows is shown by one of the few."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from heapq import heapify, heappop, heappush
from typing import TypeVar

Case = TypeVar("Case", bound=Hashable)


def cover(facts: Mapping[Case, frozenset[Hashable]], cost: Callable[[Case], float]) -> list[Case]:
    """Return cases, in the order given, of which none may be left out. Greedy: the next one has the most new facts for its cost.

    Args:
        facts: those that each case shows.
    """
    left = set().union(*facts.values())
    heap = [(-len(shown) / cost(case), number, case) for number, (case, shown) in enumerate(facts.items())]
    heapify(heap)
    chosen: list[Case] = []
    while left:
        _, number, case = heappop(heap)
        gain = -len(facts[case] & left) / cost(case)
        if heap and gain > heap[0][0]:  # others have been chosen since
            heappush(heap, (gain, number, case))
            continue
        chosen.append(case)
        left -= facts[case]
    times = Counter(fact for case in chosen for fact in facts[case])
    for case in sorted(chosen, key=cost, reverse=True):
        if all(times[fact] > 1 for fact in facts[case]):
            chosen.remove(case)
            times.subtract(facts[case])
    return [case for case in facts if case in chosen]
