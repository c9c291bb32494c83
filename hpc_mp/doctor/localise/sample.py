"""What the localiser asks for and what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Pair = tuple[int, int]
"""Indices of two nodes, the smaller first."""

Kind = Literal["node", "rail", "uplink", "link", "down"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One rail of one pair in one round.

    Attributes:
        rate: GB/s of the slower direction; None = no answer (hung, refused, cut).
    """

    pair: Pair
    rail: int
    rate: float | None


Measure = Callable[[Sequence[Pair]], Sequence[Sample]]
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

    kind: Kind
    members: tuple[str, ...]
    factor: float
    certain: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class Verdict:
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
    samples: tuple[Sample, ...]
    complete: bool
