"""Outstanding faults among healthy pairs of uneven rates.

The fit of nodes assumes that healthy pairs are equally fast except for noise. On some clusters they are not: hosts of one
machine share its processors, routes differ in length, cables have different rates. The result of the fit is therefore compared
with the spread of the pairs without suspects. If these are alike, the result stands. Else a node is certainly bad if even its
fastest pair is slower than any healthy pair can be, and a link if it is itself slower than that. A rate between that bound and
the middle of the healthy rates is a suspicion. The fastest sample of every pair is used, because simultaneous transfers only
slow a pair down.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log, pow, sqrt

import numpy as np

from hpc_mp.base.grouping import grouped
from hpc_mp.doctor.localise.analysis import ENOUGH, NetworkState
from hpc_mp.doctor.localise.fit import NEAR, scatter
from hpc_mp.doctor.localise.record import ClusterLayout, Floats, Pair, PairTable

NATURAL = log(2)
"""Log factor by which healthy pairs may differ by nature: assumed until enough of them show that they differ by less."""
CHANCE = 0.001  # probability that healthy pairs differ by more than the measured ones show
ODD = 0.01  # chance of a pair to be slow for some reason of its own
EXACT = 0.01  # sigma below which log rates of pairs are never known


@dataclass(frozen=True, slots=True)
class Pairs:
    """Log rates of pairs, the best sample of each. ``nodes``: number of nodes."""

    rate: dict[Pair, float]
    nodes: int

    def of(self, node: int) -> list[float]:
        return [rate for pair, rate in self.rate.items() if node in pair]

    def ends(self) -> set[int]:
        return {node for pair in self.rate for node in pair}

    def without(self, nodes: Iterable[int] = (), pairs: Iterable[Pair] = ()) -> "Pairs":
        gone, cut = {*nodes}, {*pairs}
        return replace(self, rate={pair: rate for pair, rate in self.rate.items() if pair not in cut and not gone & {*pair}})


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of healthy log rates."""

    level: float  # median
    slowest: float  # tenth percentile; a tenth of many may be slower for separate reasons
    possible: float  # largest possible difference between healthy rates

    @property
    def node(self) -> float:
        """The lower bound of a healthy node's fastest pair, even if the median were the fastest healthy rate."""
        return min(self.level - self.possible, self.slowest) - NEAR

    @property
    def link(self) -> float:
        """The lower bound of a healthy pair. One pair is weaker evidence than all pairs of a node, so a gap as wide as the whole
        healthy range is required."""
        return self.slowest - self.possible - NEAR

    @property
    def likely(self) -> float:
        """The lower bound of both if the median is in the middle of the healthy range."""
        return min(self.level - self.possible / 2, self.slowest) - NEAR


def spread(pairs: Pairs) -> Spread:
    """Return the spread of these pairs, each of which may have a separate rate."""
    values = sorted(pairs.rate.values())
    return Spread(float(np.median(values)), values[len(values) // 10], _possible(values, len(values)))


def spread_of_nodes(pairs: Pairs) -> Spread:
    """Return the spread of the fastest pair of each node. ``slowest`` is still taken from all pairs."""
    own = {node: max((rate, pair) for pair, rate in pairs.rate.items() if node in pair) for node in pairs.ends()}
    values, every = sorted(rate for rate, _ in own.values()), sorted(pairs.rate.values())
    return Spread(float(np.median(values)), every[len(every) // 10], _possible(values, len({pair for _, pair in own.values()})))


def _possible(values: Sequence[float], independent: int) -> float:
    """Return by how much such values may differ, if a tenth is slower for separate reasons. The probability that m independent
    rates, uniform over a range W, are all within w is at most m·(w/W)^(m−1)."""
    if independent < 2:
        return NATURAL
    return min(NATURAL, (values[-1] - values[len(values) // 10]) * pow(independent / CHANCE, 1 / (independent - 1)))

@dataclass(frozen=True, slots=True)
class Outstanding:
    """Nodes and links slower than anything healthy. ``left``: the pairs without them."""

    nodes: tuple[int, ...]
    links: tuple[Pair, ...]
    left: Pairs

    @property
    def level(self) -> float:
        return float(np.median([*self.left.rate.values()]))


def outstanding(pairs: Pairs, never: frozenset[int] = frozenset()) -> Outstanding:
    """Return the largest sets of nodes (none of ``never``) and links that stand out together, always a minority of all."""
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
        apart = len({node for link in links for node in link}) == 2 * count  # several links of one node may be due to the node
        if apart and rest.ends() >= left.ends() and rest.rate and left.rate[links[-1]] < spread(rest).link:
            return Outstanding(tuple(nodes), tuple(links), rest)
    return Outstanding(tuple(nodes), (), left)


def best(state: NetworkState, cluster: ClusterLayout, rail: int | None = None) -> Pairs:
    """Return the best sample of every pair, on one rail or as the mean of all rails."""
    table = _fair(state)
    rates = table.rate.mean(axis=1) if rail is None else table.rate[:, rail]
    return Pairs({pair: max(values) for pair, values in _samples(table, rates).items()}, cluster.size)


def _fair(state: NetworkState) -> PairTable:
    """Return the table, without crowded samples if crowds slow pairs down."""
    table = state.table
    rates = table.rate.mean(axis=1)
    alone, crowded = (_samples(table.take(rows), rates[rows]) for rows in (table.alone, ~table.alone))
    both = alone.keys() & crowded.keys()
    usual, slowed = (float(np.median([max(of[pair]) for pair in (both if len(both) >= ENOUGH else of)])) if of else inf
                     for of in (alone, crowded))
    return table.take(table.alone) if state.load.tapered and len(alone) >= ENOUGH and usual - slowed > NEAR else table


def _samples(table: PairTable, rates: Floats) -> dict[Pair, list[float]]:
    ends = zip(table.one.tolist(), table.other.tolist(), strict=True)
    return grouped(zip(ends, rates.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """The logarithm of a measured rate, and its sigma."""

    value: float
    sigma: float


def measured(state: NetworkState, rest: Pairs) -> dict[Pair, MeasuredRate]:
    """Return the median sample of every pair, free of the best sample's luck. Noise is estimated from repeats of a pair."""
    table = _fair(state)
    samples = _samples(table, table.rate.mean(axis=1))
    repeated = np.concatenate([np.diff(values) for values in samples.values()])
    noise = scatter(repeated) / sqrt(2) if len(repeated) >= ENOUGH else state.noise
    return {pair: MeasuredRate(float(np.median(values)), max(1.25 * noise / sqrt(len(values)), EXACT))
            for pair, values in samples.items() if pair in rest.rate}


def fastest(rates: Mapping[Pair, MeasuredRate]) -> dict[int, MeasuredRate]:
    """Return the rate of every node: that of its fastest pair, if a pair has the rate of its slower end."""
    ends = {node for pair in rates for node in pair}
    return {node: max((rate for pair, rate in rates.items() if node in pair), key=lambda rate: rate.value) for node in ends}


def alike(rates: Collection[MeasuredRate], independent: int) -> float:
    """Return the log odds that these rates are equal except for noise, against rates spread over the natural range.

    The noise is estimated from few samples, so Student's t distribution with four degrees of freedom is used. Its density at t
    is 3/8 · (1 + t²/4)^−2.5. ``independent`` is as in ``_possible``.
    """
    if independent < 2 or not rates:
        return -inf
    value, sigma = (np.array([getattr(rate, name) for rate in rates]) for name in ("value", "sigma"))
    off = (value - np.median(value)) / sigma
    odds = np.log(NATURAL / sigma * 3 / 8 * (1 + off**2 / 4) ** -2.5)
    odds = np.where(off < 0, np.maximum(odds, log(ODD)), odds)  # single pairs may be slow for separate reasons, not fast
    return (independent - 1) * float(odds.mean())


def away(below: float) -> float:
    """Return the log odds against one rate being that far below another, if both are uniform over the natural range."""
    return log(2) - 2 * log(min(1.0, max(EXACT, 1 - below / NATURAL)))
