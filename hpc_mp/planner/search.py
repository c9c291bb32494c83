"""Looks for the cheapest order of hosts: among all orders of a few, by exchanging two at a time of many."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations, islice, permutations
from math import factorial
from operator import ne

Order = tuple[str, ...]
Cost = Callable[[Sequence[str]], tuple[float, ...]]


def cheapest(starts: Sequence[Order], first: Cost, then: Cost, movable: Collection[str], tries: int) -> Order:
    """The order that costs least by ``first``, of equal ones by ``then``; of still equal ones the most like ``starts[0]``.

    Args:
        starts: orders that may be good, as they stand and dealt out: as the rows of a grid that is read by columns.
        then: is asked only about orders that are equal by ``first``, and so may take longer.
        movable: of two hosts that are exchanged one is of these.
        tries: how many orders may be looked at beyond these.
    """
    def likely(order: Sequence[str]) -> tuple[float, ...]:
        return *then(order), sum(map(ne, order, starts[0]))

    begin = list(dict.fromkeys([*starts, *(dealt for start in starts for dealt in _dealt(start))]))
    if factorial(len(begin[0])) <= tries:
        return _least([*begin, *permutations(begin[0])], first, likely)
    ends = {_descended(start, first, likely, movable, tries // 2): None for start in (starts[0], _least(begin, first, likely))}
    return _least([*ends], first, likely)


def _descended(order: Order, first: Cost, then: Cost, movable: Collection[str], tries: int) -> Order:
    """Two hosts exchanged, time and again, as long as that makes it cheaper."""
    while near := [*islice(_exchanged(order, movable), tries)]:
        tries -= len(near)
        found = _least([order, *near], first, then)
        if first(found) == first(order):
            break
        order = found
    return order


def _least(orders: Sequence[Order], first: Cost, then: Cost) -> Order:
    prices = [first(order) for order in orders]
    least = min(prices)
    equal = [order for order, price in zip(orders, prices, strict=True) if price == least]
    return min(equal, key=then)


def _dealt(order: Order) -> Iterator[Order]:
    for rows in range(2, len(order)):
        if len(order) % rows == 0:
            yield tuple(host for row in range(rows) for host in order[row::rows])


def _exchanged(order: Order, movable: Collection[str]) -> Iterator[Order]:
    for i, j in combinations(range(len(order)), 2):
        if order[i] in movable or order[j] in movable:
            yield (*order[:i], order[j], *order[i + 1 : j], order[i], *order[j + 1 :])
