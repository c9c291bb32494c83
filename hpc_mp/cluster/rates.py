"""Rates between hosts as an order of hosts needs them: for every pair, and without the scatter of measurements."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

from hpc_mp.cluster.bandwidth import Measured

ALIKE = 0.85
"""Down to this share of one another rates are alike: those of healthy pairs scatter by some per cent."""


@dataclass(frozen=True, slots=True)
class Rates:
    """GB/s of one direction.

    Attributes:
        usual: of the median pair.
        pairs: of every pair that was measured, under (a, b) and under (b, a).
        ends: host → the best rate that it was measured with, where that was with two others or more: the worse one of two
            hosts cannot be told from their pair.
    """

    usual: float
    pairs: Mapping[tuple[str, str], float]
    ends: Mapping[str, float]

    def between(self, a: str, b: str) -> float:
        """A pair that was not measured has the usual rate, or that of its worse end where this is less."""
        found = self.pairs.get((a, b))
        return found if found is not None else min(self.usual, self.end(a), self.end(b))

    def end(self, host: str) -> float:
        return self.ends.get(host, self.usual)

    def uneven(self, hosts: Collection[str]) -> frozenset[str]:
        """The hosts that have another rate than the usual one, or have it with another of them."""
        known = {*hosts}
        apart = (pair for pair, rate in self.pairs.items() if rate != self.usual and known.issuperset(pair))
        return frozenset(host for host in known if self.end(host) != self.usual).union(*apart)

    def slow(self, hosts: Collection[str]) -> dict[tuple[str, ...], float]:
        """Share of the usual rate by (host,) or, where that is not an end's, by (a, b); the slowest first."""
        known = {*hosts}
        found: dict[tuple[str, ...], float] = {(host,): self.end(host) for host in hosts}
        found |= {pair: rate for pair, rate in self.pairs.items()
                  if pair[0] < pair[1] and known.issuperset(pair) and rate < min(map(self.end, pair))}
        return {members: rate / self.usual for members, rate in sorted(found.items(), key=lambda item: item[1])
                if rate < self.usual}

    def chained(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """From the first one always on to the nearest that is left: those with good ways between them stand together."""
        order, left = [*hosts[:1]], [*hosts[1:]]
        while left:
            order.append(max(left, key=lambda host: self.between(order[-1], host)))
            left.remove(order[-1])
        return tuple(order)


def rates(measured: Measured) -> Rates | None:
    """None where nothing was measured.

    Rates are put into tiers, each with the rate of its median pair: the first holds those that are within ``ALIKE`` of the
    median of all, the next those within it of the median of the rest, and so on.
    """
    if not measured.pairs:
        return None
    tier = _tiers(rate for _, _, rate in measured.pairs)
    pairs = {way: tier[rate] for i, j, rate in measured.pairs for a, b in [(measured.nodes[i], measured.nodes[j])]
             for way in ((a, b), (b, a))}
    met: dict[str, list[float]] = {}
    for (a, _), rate in pairs.items():
        met.setdefault(a, []).append(rate)
    ends = {host: max(found) for host, found in met.items() if len(found) > 1}
    return Rates(tier[median_high(rate for _, _, rate in measured.pairs)], pairs, ends)


def _tiers(found: Iterable[float]) -> dict[float, float]:
    """Rate → the median of its tier. Of an even number the higher one: half of four hosts' pairs are those of one slow host."""
    left, tier = sorted(found), dict[float, float]()
    while left:
        middle = median_high(left)
        tier |= {rate: middle for rate in left if ALIKE * middle <= rate <= middle / ALIKE}
        left = [rate for rate in left if rate not in tier]
    return tier
