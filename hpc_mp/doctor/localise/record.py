"""What the localiser asks for, what it knows beforehand, everything measured so far as columns, and what it says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Pair = tuple[int, int]
"""Indices of two nodes, the smaller first."""

SuspectKind = Literal["node", "rail", "uplink", "link", "down"]


@dataclass(frozen=True, slots=True)
class RailSample:
    """One rail of one pair in one round.

    Attributes:
        rate: GB/s of the slower direction; None = no answer (hung, refused, cut).
    """

    pair: Pair
    rail: int
    rate: float | None


Measure = Callable[[Sequence[Pair]], Sequence[RailSample]]
"""One round: disjoint pairs, all at the same time, every rail. A pair that does not answer in time has the rate None."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """One fault.

    Attributes:
        kind: ``node`` = all rails of it, ``rail`` = one NIC or cable, ``uplink`` = what a leaf shares towards the others,
            ``link`` = between these two nodes only, ``down`` = no answer to anybody.
        members: node ("n3"), rail ("n3 rail 2"), leaf ("leaf4", "leaf4 rail 2"), link ("n1–n3"). The uplink of a leaf
            whose name is not known is given by the nodes behind it ("n[33-64]"). Several members: one of these.
        factor: share of the healthy rate that is left; 0 for no answer.
        certain: the evidence suffices for this one member. Otherwise it is a suspicion.
    """

    kind: SuspectKind
    members: tuple[str, ...]
    factor: float
    certain: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class Localisation:
    """What is known after a round.

    Attributes:
        expected: GB/s of a healthy pair whose traffic nothing else disturbs.
        rounds: rounds so far, retests among them.
        retests: how many of these came after the first pass, which takes at most 2·log2(n) + 6 rounds.
        samples: everything measured so far.
        complete: nothing is left to measure; otherwise this is a partial verdict.
    """

    suspects: tuple[Suspect, ...]
    expected: float
    rounds: int
    retests: int
    samples: tuple[RailSample, ...]
    complete: bool


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

DEAD = 1e-6
"""GB/s noted for a rail that does not answer while others of its pair do."""


@dataclass(frozen=True, slots=True)
class Round:
    """Disjoint pairs that are measured at the same time.

    Attributes:
        alone: by pair: nothing but its two nodes (and their cables) can hold it up. Elsewhere pairs share uplinks.
        full: every node talks, so the uplinks carry about what they ever have to.
        aimed: nodes of which all talk to others, so that what they share carries the most that it ever has to.
    """

    pairs: tuple[Pair, ...]
    alone: tuple[bool, ...]
    full: bool = False
    aimed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PairTable:
    """One row per pair and round that answered.

    Attributes:
        round, one, other: number of the round; the two ends (nodes, or leaves in a table of leaves).
        alone, full: as in ``Round``.
        aimed: of both ends, (rows, 2).
        rate: log GB/s by rail, (rows, rails).
    """

    round: Ints
    one: Ints
    other: Ints
    alone: Bools
    full: Bools
    aimed: Bools
    rate: Floats

    def take(self, rows: Bools) -> PairTable:
        return PairTable(self.round[rows], self.one[rows], self.other[rows], self.alone[rows], self.full[rows],
                     self.aimed[rows], self.rate[rows])


@dataclass(slots=True)
class RoundLog:
    """The rounds so far: their samples as they came, the table of those that answered, and the pairs that did not."""

    rails: int
    samples: list[RailSample] = field(default_factory=list)
    rounds: int = 0
    silent: list[tuple[int, Pair]] = field(default_factory=list)
    answered: dict[int, int] = field(default_factory=dict)
    talked: set[Pair] = field(default_factory=set)
    parts: list[PairTable] = field(default_factory=list)

    def add(self, round_: Round, samples: Sequence[RailSample]) -> None:
        """Notes a round. ``answered`` keeps the last round in which a node answered somebody."""
        rates = by_pair(samples, self.rails)
        talked = [(pair, alone) for pair, alone in zip(round_.pairs, round_.alone, strict=True) if pair in rates]
        self.silent += [(self.rounds, pair) for pair in round_.pairs if pair not in rates]
        self.answered.update((node, self.rounds) for pair, _ in talked for node in pair)
        self.talked.update(rates)
        ends = np.array([pair for pair, _ in talked], dtype=np.int64).reshape(-1, 2)
        self.parts.append(PairTable(
            round=np.full(len(talked), self.rounds), one=ends[:, 0], other=ends[:, 1],
            alone=np.array([alone for _, alone in talked], dtype=bool), full=np.full(len(talked), round_.full),
            aimed=np.array([[node in round_.aimed for node in pair] for pair, _ in talked], dtype=bool).reshape(-1, 2),
            rate=np.log(np.array([rates[pair] for pair, _ in talked], dtype=float).reshape(-1, self.rails))))
        self.samples += samples
        self.rounds += 1

    @property
    def table(self) -> PairTable:
        columns = PairTable.__dataclass_fields__
        return PairTable(*(np.concatenate([getattr(part, name) for part in self.parts]) for name in columns))


def by_pair(samples: Iterable[RailSample], rails: int) -> dict[Pair, list[float]]:
    """Rates by rail of the pairs of which at least one rail answered."""
    rates: defaultdict[Pair, list[float]] = defaultdict(lambda: [DEAD] * rails)
    for sample in samples:
        if sample.rate is not None:
            rates[sample.pair][sample.rail] = max(sample.rate, DEAD)
    return dict(rates)


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Attributes:
        names: of the nodes.
        leaf: index of each node's leaf, or None: not known.
        leaf_names: in the order of these indices.
        healthy: GB/s per rail that a healthy pair must reach, where that is known.
        taper: oversubscription of healthy uplinks, where that is known.
    """

    names: tuple[str, ...]
    leaf: Ints | None
    leaf_names: tuple[str, ...]
    rails: int
    healthy: float | None
    taper: float | None

    @property
    def size(self) -> int:
        return len(self.names)
