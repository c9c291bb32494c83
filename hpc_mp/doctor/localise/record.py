"""Everything measured so far, as columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpc_mp.doctor.localise.sample import Pair, Sample

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
class Table:
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

    def take(self, rows: Bools) -> Table:
        return Table(self.round[rows], self.one[rows], self.other[rows], self.alone[rows], self.full[rows],
                     self.aimed[rows], self.rate[rows])


@dataclass(slots=True)
class Record:
    """The rounds so far: their samples as they came, the table of those that answered, and the pairs that did not."""

    rails: int
    samples: list[Sample] = field(default_factory=list)
    rounds: int = 0
    silent: list[tuple[int, Pair]] = field(default_factory=list)
    answered: dict[int, int] = field(default_factory=dict)
    talked: set[Pair] = field(default_factory=set)
    parts: list[Table] = field(default_factory=list)

    def add(self, round_: Round, samples: Sequence[Sample]) -> None:
        """Notes a round. ``answered`` keeps the last round in which a node answered somebody."""
        rates = by_pair(samples, self.rails)
        talked = [(pair, alone) for pair, alone in zip(round_.pairs, round_.alone, strict=True) if pair in rates]
        self.silent += [(self.rounds, pair) for pair in round_.pairs if pair not in rates]
        self.answered.update((node, self.rounds) for pair, _ in talked for node in pair)
        self.talked.update(rates)
        ends = np.array([pair for pair, _ in talked], dtype=np.int64).reshape(-1, 2)
        self.parts.append(Table(
            round=np.full(len(talked), self.rounds), one=ends[:, 0], other=ends[:, 1],
            alone=np.array([alone for _, alone in talked], dtype=bool), full=np.full(len(talked), round_.full),
            aimed=np.array([[node in round_.aimed for node in pair] for pair, _ in talked], dtype=bool).reshape(-1, 2),
            rate=np.log(np.array([rates[pair] for pair, _ in talked], dtype=float).reshape(-1, self.rails))))
        self.samples += samples
        self.rounds += 1

    @property
    def table(self) -> Table:
        return Table(*(np.concatenate([getattr(part, name) for part in self.parts]) for name in Table.__dataclass_fields__))


def by_pair(samples: Iterable[Sample], rails: int) -> dict[Pair, list[float]]:
    """Rates by rail of the pairs of which at least one rail answered."""
    rates: defaultdict[Pair, list[float]] = defaultdict(lambda: [DEAD] * rails)
    for sample in samples:
        if sample.rate is not None:
            rates[sample.pair][sample.rail] = max(sample.rate, DEAD)
    return dict(rates)
