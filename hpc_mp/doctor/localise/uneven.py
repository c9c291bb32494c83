"""What stands out where healthy pairs are unevenly fast.

The fit of nodes takes healthy pairs for equally fast but for noise. On some clusters they are not: hosts of one machine share
its processors, routes differ in length, cables have different rates. So what the fit has found is held against the spread of
the pairs that have no part in it. Where these are alike, it stands. Else a node is bad for certain if even its fastest pair is
slower than any healthy pair can be beside them, a link if it is itself, and what lies between that and the middle of what is
healthy is a suspicion. The fastest sample of every pair counts, because others who talk at the same time only ever slow a
pair down.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log, pow, sqrt

import numpy as np

from hpc_mp.doctor.localise.analysis import ENOUGH, NetworkState
from hpc_mp.doctor.localise.fit import NEAR, scatter
from hpc_mp.doctor.localise.record import ClusterLayout, Floats, Pair, PairTable

NATURAL = log(2)
"""Log factor by which healthy pairs may differ by nature: assumed until enough of them show that they differ by less."""
CHANCE = 0.001
"""Of pairs that differ more than those that are seen make believe."""
ODD = 0.01
"""Chance of a pair to be slow for some reason of its own."""
EXACT = 0.01
"""Sigma below which log rates of pairs are never known."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Log rates of pairs, of each its best sample. ``nodes``: how many there are."""

    rate: dict[Pair, float]
    nodes: int

    def of(self, node: int) -> list[float]:
        return [rate for pair, rate in self.rate.items() if node in pair]

    def ends(self) -> set[int]:
        return {node for pair in self.rate for node in pair}

    def without(self, nodes: Iterable[int] = (), pairs: Iterable[Pair] = ()) -> Pairs:
        gone, cut = {*nodes}, {*pairs}
        return replace(self, rate={pair: rate for pair, rate in self.rate.items() if pair not in cut and not gone & {*pair}})


@dataclass(frozen=True, slots=True)
class Spread:
    """Of healthy log rates.

    Attributes:
        level: their median.
        slowest: of many, a tenth may be slower for reasons of their own.
        possible: by how much healthy ones may differ.
    """

    level: float
    slowest: float
    possible: float

    @property
    def node(self) -> float:
        """Of a healthy node the fastest pair is not slower than this, though the median were the fastest of the healthy."""
        return min(self.level - self.possible, self.slowest) - NEAR

    @property
    def link(self) -> float:
        """Nor a healthy pair than this: it alone says less than all pairs of a node, so a gap must part it from the others that
        is as wide as all that is healthy."""
        return self.slowest - self.possible - NEAR

    @property
    def likely(self) -> float:
        """Nor either than this, if the median lies in the middle of the healthy."""
        return min(self.level - self.possible / 2, self.slowest) - NEAR


def spread(pairs: Pairs) -> Spread:
    """The spread of these pairs, each of which may have a rate of its own."""
    values = sorted(pairs.rate.values())
    return Spread(float(np.median(values)), values[len(values) // 10], _possible(values, len(values)))


def spread_of_nodes(pairs: Pairs) -> Spread:
    """The spread of what their nodes can do: of each its fastest pair. The slowest pair stays that of all."""
    own = {node: max((rate, pair) for pair, rate in pairs.rate.items() if node in pair) for node in pairs.ends()}
    values, every = sorted(rate for rate, _ in own.values()), sorted(pairs.rate.values())
    return Spread(float(np.median(values)), every[len(every) // 10], _possible(values, len({pair for _, pair in own.values()})))


def _possible(values: Sequence[float], independent: int) -> float:
    """By how much such values may differ, of which so many are independent and a tenth is slower for reasons of its own.

    Of m rates, spread evenly over a range W, all lie within w with a chance of m·(w/W)^(m−1) at most.
    """
    if independent < 2:
        return NATURAL
    return min(NATURAL, (values[-1] - values[len(values) // 10]) * pow(independent / CHANCE, 1 / (independent - 1)))


def by_nodes(pairs: Pairs) -> int:
    """Rates that are independent if each pair has that of its slower end: the fastest node's is never seen."""
    return len(pairs.ends()) - 1


@dataclass(frozen=True, slots=True)
class Outstanding:
    """What is slower than anything healthy. ``left``: the pairs that have no part in it."""

    nodes: tuple[int, ...]
    links: tuple[Pair, ...]
    left: Pairs

    @property
    def level(self) -> float:
        return float(np.median([*self.left.rate.values()]))


def outstanding(pairs: Pairs, never: frozenset[int] = frozenset()) -> Outstanding:
    """The nodes (none of ``never``) and links that stand out, as many as do so together; always the fewer of all."""
    ranked = sorted(pairs.ends() - never, key=lambda node: max(pairs.of(node)))
    nodes: list[int] = []
    left = pairs
    for count in range((len(pairs.ends()) - 1) // 2, 0, -1):
        rest = pairs.without(ranked[:count])
        if rest.rate and len(ranked) >= count and max(pairs.of(ranked[count - 1])) < spread_of_nodes(rest).node:
            nodes, left = ranked[:count], rest
            break
    slowest = sorted(left.rate, key=left.rate.__getitem__)
    for count in range(max(1, len(slowest) // 4), 0, -1):
        links = slowest[:count]
        rest = left.without(pairs=links)
        apart = len({node for link in links for node in link}) == 2 * count  # several of one node may be due to the node
        if apart and rest.ends() >= left.ends() and rest.rate and left.rate[links[-1]] < spread(rest).link:
            return Outstanding(tuple(nodes), tuple(links), rest)
    return Outstanding(tuple(nodes), (), left)


def best(state: NetworkState, cluster: ClusterLayout, rail: int | None = None) -> Pairs:
    """The best sample of every pair, of one rail or the mean of all."""
    table = _fair(state)
    rates = table.rate.mean(axis=1) if rail is None else table.rate[:, rail]
    return Pairs({pair: max(values) for pair, values in _samples(table, rates).items()}, cluster.size)


def _fair(state: NetworkState) -> PairTable:
    """Without crowded samples where a crowd slows pairs down."""
    table = state.table
    rates = table.rate.mean(axis=1)
    alone, crowded = (_samples(table.take(rows), rates[rows]) for rows in (table.alone, ~table.alone))
    both = alone.keys() & crowded.keys()
    usual, slowed = (float(np.median([max(of[pair]) for pair in (both if len(both) >= ENOUGH else of)])) if of else inf
                     for of in (alone, crowded))
    return table.take(table.alone) if state.load.tapered and len(alone) >= ENOUGH and usual - slowed > NEAR else table


def _samples(table: PairTable, rates: Floats) -> dict[Pair, list[float]]:
    found: dict[Pair, list[float]] = {}
    for one, other, rate in zip(table.one.tolist(), table.other.tolist(), rates.tolist(), strict=True):
        found.setdefault((one, other), []).append(rate)
    return found


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """A rate that may be one of many alike ones: its logarithm, and the sigma of that."""

    value: float
    sigma: float


def measured(state: NetworkState, rest: Pairs) -> dict[Pair, MeasuredRate]:
    """The usual sample of every pair: without the luck of the best of many. The noise is what a pair differs by from itself."""
    table = _fair(state)
    samples = _samples(table, table.rate.mean(axis=1))
    repeated = np.concatenate([np.diff(values) for values in samples.values()])
    noise = scatter(repeated) / sqrt(2) if len(repeated) >= ENOUGH else state.noise
    return {pair: MeasuredRate(float(np.median(values)), max(1.25 * noise / sqrt(len(values)), EXACT))
            for pair, values in samples.items() if pair in rest.rate}


def fastest(rates: Mapping[Pair, MeasuredRate]) -> dict[int, MeasuredRate]:
    """Of every node: its own rate, where a pair has that of its slower end."""
    ends = {node for pair in rates for node in pair}
    return {node: max((rate for pair, rate in rates.items() if node in pair), key=lambda rate: rate.value) for node in ends}


def alike(rates: Collection[MeasuredRate], independent: int) -> float:
    """Log odds that these rates are equal but for noise, not spread over all that is natural.

    The noise is known from few samples, so its tails are those of Student's t with four degrees of freedom, whose density at t
    is 3/8 · (1 + t²/4)^−2.5.

    Args:
        independent: as in ``_possible``.
    """
    if independent < 2 or not rates:
        return -inf
    value, sigma = (np.array([getattr(rate, name) for rate in rates]) for name in ("value", "sigma"))
    off = (value - np.median(value)) / sigma
    odds = np.log(NATURAL / sigma * 3 / 8 * (1 + off**2 / 4) ** -2.5)
    odds = np.where(off < 0, np.maximum(odds, log(ODD)), odds)  # nothing makes a pair fast for reasons of its own
    return (independent - 1) * float(odds.mean())


def away(below: float) -> float:
    """Log odds against two rates, spread evenly over all that is natural, that differ by so much, the one below the other."""
    return log(2) - 2 * log(min(1.0, max(EXACT, 1 - below / NATURAL)))
