"""What a survey has seen so far: plain facts, from which ``classify`` draws its conclusions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hpc_mp.doctor.survey.compute import Computed
from hpc_mp.doctor.survey.facts import NodeFacts
from hpc_mp.doctor.survey.node_report import NodeReport
from hpc_mp.doctor.survey.probe import Probed

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Leg:
    """One direction of one transfer on one rail.

    Attributes:
        rate: GB/s; None where nothing arrived.
        segments, lost: sent with data, and of these sent again because they were lost.
        limited: share of the time in which the receiver took too little.
        latency: seconds of half a round trip; None where it was not measured.
        paced: sent at a low rate, at which nothing is lost for lack of room.
        why: what went wrong, where no rate is given.
    """

    sender: int
    receiver: int
    rail: int
    rate: float | None
    segments: int = 0
    lost: int = 0
    limited: float = 0.0
    latency: float | None = None
    paced: bool = False
    why: str = ""

    @property
    def pair(self) -> Pair:
        return min(self.sender, self.receiver), max(self.sender, self.receiver)


@dataclass(frozen=True, slots=True)
class Echo:
    """What came of the packets from one node to another on one rail."""

    sender: int
    receiver: int
    rail: int
    seen: Probed


class Absence(NamedTuple):
    """Why a node has no agent that can measure, and the code of the diagnosis that this is."""

    code: str
    why: str


@dataclass(slots=True)
class SurveyEvidence:
    """Of the nodes with an agent; a node is its index in ``nodes``.

    Attributes:
        nodes: names, in the order of the agents.
        absent: the other nodes that were wanted, by name.
        leaves: leaf switch by node name, as far as known.
        reports: what nodes say of themselves, by node.
        trials: what nodes computed at the same time, one entry per trial.
        counters: errors and drops of the interfaces that came during the survey, by node and counter.
    """

    nodes: tuple[str, ...]
    facts: tuple[NodeFacts, ...]
    absent: Mapping[str, Absence] = field(default_factory=dict)
    leaves: Mapping[str, str] = field(default_factory=dict)
    reports: dict[int, NodeReport] = field(default_factory=dict)
    legs: list[Leg] = field(default_factory=list)
    echoes: list[Echo] = field(default_factory=list)
    trials: list[Mapping[int, Computed]] = field(default_factory=list)
    counters: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def rails(self) -> int:
        """That every node has."""
        return min(len(facts.interfaces) for facts in self.facts)


def by_pair(legs: Iterable[Leg]) -> dict[Pair, list[Leg]]:
    """The transfers of every pair."""
    grouped: dict[Pair, list[Leg]] = {}
    for leg in legs:
        grouped.setdefault(leg.pair, []).append(leg)
    return grouped
