"""A simulated cluster whose healthy pairs are unevenly fast: agents that answer the survey's orders from a table of rates.

All that is simulated is what agents say. Orders, transfers, rounds, verdict, diagnoses and the ledger are the survey's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import exp, log

from hpc_mp.doctor.survey.agents import Message
from hpc_mp.doctor.survey.evidence import Pair, SurveyEvidence
from hpc_mp.doctor.survey.facts import Interface, NodeFacts
from hpc_mp.doctor.survey.measurements import Measurements
from hpc_mp.doctor.survey.node_report import NodeReport
from hpc_mp.doctor.survey.procedure import survey
from hpc_mp.doctor.survey.report import Report, findings

BEST = 4e9  # bytes per second of the fastest pair
SEGMENTS = 9000


@dataclass
class UnevenCluster:
    """Attributes:
        rates: share of ``BEST`` by pair.
        leaves: leaf of every node; none: not known.
        jitter: each transfer gets this share of its pair's rate at least.
    """

    rates: Mapping[Pair, float]
    leaves: tuple[str, ...] = ()
    jitter: float = 0.9
    seed: int = 0
    dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{node + 1}" for node in range(1 + max(map(max, self.rates))))

    def order(self, order: Message, awaited: Iterable[int], within: float) -> dict[int, Message]:
        """``AgentPool.order``."""
        match order["do"]:
            case "transfer":
                return {rank: answer for pair in order["pairs"] for rank, answer in self._transfer(*pair).items()}
            case "report":
                return {rank: {"seen": NodeReport().document()} for rank in awaited}
            case "compute":
                return {rank: {"rate": 1000.0, "share": 1.0, "digest": "same", "idle": 0.0} for rank in order["ranks"]}
            case "probe":
                return {int(rank): {"rails": {"0": {str(peer): {"small": 3, "full": 3} for peer in peers}}}
                        for rank, peers in order["peers"].items()}
            case "counters":
                return {rank: {"counters": {}} for rank in awaited}
        return {}

    def _transfer(self, one: int, other: int) -> dict[int, Message]:
        rates = [BEST * self.rates[one, other] * self.dice.uniform(self.jitter, 1.0) for _ in range(2)]
        return {rank: {"ends": [{"rail": 0, "direction": direction, "rate": rate, "segments": SEGMENTS}
                                if direction == side else {"rail": 0, "direction": direction}
                                for direction, rate in enumerate(rates)]}
                for side, rank in enumerate((one, other))}

    def surveyed(self) -> Report:
        """The complete report, as ``hpc-mp doctor --nodes`` has it."""
        names = self.names
        facts = tuple(NodeFacts(name, (Interface("eth0", f"10.0.0.{node}", 1500, 10000),), "EPYC", 4, 1)
                      for node, name in enumerate(names))
        evidence = SurveyEvidence(names, facts, leaves=dict(zip(names, self.leaves, strict=False)))
        [*_, last] = survey(Measurements(self, range(len(names)), evidence))  # type: ignore[arg-type]
        return Report("lab", 1.7e9, 12.0, evidence, last.verdict, last.diagnoses, last.complete)


@dataclass(frozen=True)
class Drawn:
    """A cluster of 3 to 16 nodes whose healthy pairs differ by up to twofold, and the name of what is slow in it, if anything."""

    cluster: UnevenCluster
    name: str | None


def drawn(seed: int, slow: str | None, least: float = 2.5) -> Drawn:
    """A random one. Each healthy pair has a rate of its own, or that of the slower of its nodes.

    Args:
        slow: ``node`` or ``link``: what is slower than the slowest healthy pair, by a factor of ``least`` to a hundred.
    """
    dice = random.Random(f"{slow} {seed}")
    count, spread = dice.randint(3, 16), dice.uniform(1.5, 2.0)
    pairs = [*combinations(range(count), 2)]
    if dice.random() < 0.5:
        rates = {pair: dice.uniform(1 / spread, 1.0) for pair in pairs}
    else:
        own = [dice.uniform(1 / spread, 1.0) for _ in range(count)]
        rates = {pair: min(own[node] for node in pair) for pair in pairs}
    culprit, capped = dice.choice(pairs), dice.random() < 0.5
    bad = {"node": [pair for pair in pairs if culprit[0] in pair], "link": [culprit], None: []}[slow]
    left = min(rates.values()) / exp(dice.uniform(log(least), log(100)))
    rates |= {pair: left if capped else left * rates[pair] for pair in bad}
    leaves = tuple(f"s{2 * node // count}" for node in range(count)) if count > 3 and dice.random() < 0.4 else ()
    cluster = UnevenCluster(rates, leaves, dice.uniform(0.8, 0.98), seed=seed)
    ends = [cluster.names[node] for node in culprit]
    return Drawn(cluster, {"node": ends[0], "link": "–".join(ends), None: None}[slow])


def said(report: Report) -> list[tuple[str, tuple[str, ...], bool]]:
    return [(found.code, found.members, found.certain) for found in report.diagnoses]


def ledger(report: Report) -> set[str]:
    """Nodes that the survey puts into it."""
    return {found.node for found in findings(report)}
