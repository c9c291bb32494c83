"""Data types of the localiser: its measurements, the cluster's layout, the log of rounds as columns, and its verdict."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Pair = tuple[int, int]  # indices of two nodes, the smaller first

LINK = "–"  # the sign between the two ends of a link

SuspectKind = Literal["node", "rail", "uplink", "link", "down"]


@dataclass(frozen=True, slots=True)
class RailSample:
    """The sample of one rail of one pair in one round."""

    pair: Pair
    rail: int
    rate: float | None  # rate of the slower direction in GB/s; None = no answer (hung, refused, cut)


Measure = Callable[[Sequence[Pair]], Sequence[RailSample]]
"""One round: disjoint pairs, all at the same time, every rail. A pair that does not answer in time has the rate None."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A suspected fault."""

    # ``node`` = all rails of a node, ``rail`` = one NIC or cable, ``uplink`` = the shared path from a leaf to the others,
    # ``link`` = only between these two nodes, ``down`` = no answer to any node
    kind: SuspectKind
    # node ("n3"), rail ("n3 rail 2"), leaf ("leaf4", "leaf4 rail 2"), link ("n1–n3"). The uplink of a leaf with unknown name is
    # given by the nodes behind it ("n[33-64]"). Several members mean that one of them is bad.
    members: tuple[str, ...]
    factor: float  # remaining fraction of the healthy rate; 0 for no answer
    certain: bool  # True if the evidence suffices for the single member; else it is a suspicion
    evidence: str


@dataclass(frozen=True, slots=True)
class Localisation:
    """The verdict after a round."""

    suspects: tuple[Suspect, ...]
    expected: float  # rate of an undisturbed healthy pair in GB/s
    rounds: int  # number of rounds so far, including retests
    retests: int  # number of rounds after the first pass, which takes at most 2·log2(n) + 6 rounds
    complete: bool  # True if nothing is left to measure; else this is a partial verdict


def nodes_of(members: Iterable[str]) -> list[str]:
    """Return the nodes in names of nodes, rails and links."""
    return [end.partition(" rail ")[0] for member in members for end in member.split(LINK)]


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

DEAD = 1e-6  # GB/s noted for a rail that does not answer while others of its pair do


@dataclass(frozen=True, slots=True)
class Round:
    """Disjoint pairs that are measured at the same time."""

    pairs: tuple[Pair, ...]
    alone: tuple[bool, ...]  # by pair, True if only its two nodes and their cables can slow it down; other pairs share uplinks
    full: bool = False  # True if every node talks, so that uplinks carry about their maximum load
    # nodes that all talk to other nodes than these, so that their shared uplinks carry the maximum load
    aimed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PairTable:
    """A table with one row per pair and round that answered."""

    round: Ints  # number of the round
    one: Ints  # first end: a node, or a leaf in a table of leaves
    other: Ints  # second end
    alone: Bools  # as in ``Round``
    full: Bools  # as in ``Round``
    aimed: Bools  # True for ends in ``Round.aimed``, (rows, 2)
    rate: Floats  # log GB/s by rail, (rows, rails)

    def take(self, rows: Bools) -> "PairTable":
        return PairTable(self.round[rows], self.one[rows], self.other[rows], self.alone[rows], self.full[rows],
                     self.aimed[rows], self.rate[rows])


@dataclass(slots=True)
class RoundLog:
    """The log of rounds: the table of pairs that answered, and the pairs that did not."""

    rails: int
    rounds: int = 0
    silent: list[tuple[int, Pair]] = field(default_factory=list)
    answered: dict[int, int] = field(default_factory=dict)
    talked: set[Pair] = field(default_factory=set)
    parts: list[PairTable] = field(default_factory=list)

    def add(self, round_: Round, samples: Sequence[RailSample]) -> None:
        """Add a round. ``answered`` keeps the last round in which each node answered."""
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
        self.rounds += 1

    @property
    def table(self) -> PairTable:
        columns = PairTable.__dataclass_fields__
        return PairTable(*(np.concatenate([getattr(part, name) for part in self.parts]) for name in columns))


def by_pair(samples: Iterable[RailSample], rails: int) -> dict[Pair, list[float]]:
    """Return the rates by rail of pairs with at least one rail that answered."""
    rates: defaultdict[Pair, list[float]] = defaultdict(lambda: [DEAD] * rails)
    for sample in samples:
        if sample.rate is not None:
            rates[sample.pair][sample.rail] = max(sample.rate, DEAD)
    return dict(rates)


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """The known layout of the cluster."""

    names: tuple[str, ...]  # of the nodes
    leaf: Ints | None  # index of each node's leaf; None: unknown
    leaf_names: tuple[str, ...]  # names of the leaves, in the order of these indices
    rails: int

    @property
    def size(self) -> int:
        return len(self.names)
