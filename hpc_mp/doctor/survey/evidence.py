"""The evidence of a survey so far: plain facts, from which ``diagnose`` draws conclusions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hpc_mp.base.grouping import grouped
from hpc_mp.doctor.survey.facts import Computed, NodeFacts
from hpc_mp.doctor.survey.node_report import NodeReport
from hpc_mp.doctor.survey.probe import Probed

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Leg:
    """One direction of one transfer on one rail."""

    sender: int
    receiver: int
    rail: int
    rate: float | None  # GB/s; None if nothing arrived
    segments: int = 0  # data segments sent
    lost: int = 0  # segments of these, retransmitted because they were lost
    paced: bool = False  # True if sent at a low rate, at which no queue overflows
    why: str = ""  # reason if there is no rate

    @property
    def pair(self) -> Pair:
        return min(self.sender, self.receiver), max(self.sender, self.receiver)


@dataclass(frozen=True, slots=True)
class Echo:
    """The result of the probe packets from one node to another on one rail."""

    sender: int
    receiver: int
    rail: int
    counts: Probed


class Absence(NamedTuple):
    """The reason why a node has no agent that can measure, and the code of the resulting diagnosis."""

    code: str
    why: str


@dataclass(slots=True)
class SurveyEvidence:
    """The evidence on the nodes with an agent; a node is its index in ``nodes``."""

    nodes: tuple[str, ...]  # names, in the order of the agents
    facts: tuple[NodeFacts, ...]
    absent: Mapping[str, Absence] = field(default_factory=dict)  # requested nodes without an agent, by name
    leaves: Mapping[str, str] = field(default_factory=dict)  # leaf switch by node name, as far as known
    reports: dict[int, NodeReport] = field(default_factory=dict)  # the nodes' own reports, by node
    legs: list[Leg] = field(default_factory=list)
    echoes: list[Echo] = field(default_factory=list)
    # results of nodes that computed at the same time, one entry per trial
    trials: list[Mapping[int, Computed]] = field(default_factory=list)
    # errors and drops of the interfaces during the survey, by node and counter
    counters: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def rails(self) -> int:
        """The number of rails that every node has."""
        return min(len(facts.interfaces) for facts in self.facts)


def by_pair(legs: Iterable[Leg]) -> dict[Pair, list[Leg]]:
    """Return the transfers of every pair."""
    return grouped((leg.pair, leg) for leg in legs)
