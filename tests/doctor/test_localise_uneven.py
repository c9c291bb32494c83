"""Where healthy pairs are unevenly fast: what is slow is named, and nobody else gets into the ledger."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import combinations
from math import exp, log

import pytest

from hpc_mp.doctor.localise import verdict
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
                return {rank: {"seen": asdict(NodeReport())} for rank in awaited}
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


COVER, CLUSTERS = 8, 200
"""Clusters of every run of the tests, and of ``make prove``: none of them was looked at while the rules were made."""
PROOF = [pytest.param(range(COVER), id="cover"), pytest.param(range(COVER, CLUSTERS), id="proof", marks=pytest.mark.prove)]


def of_the_walk(leaves: tuple[str, ...], seed: int) -> UnevenCluster:
    """Four hosts of one machine: n4's cable carries 12 MB/s, the others gigabytes, 32 to 88 % of the best, never twice alike."""
    dice = random.Random(seed)
    rates = {pair: 0.003 if 3 in pair else dice.uniform(0.32, 0.88) for pair in combinations(range(4), 2)}
    return UnevenCluster(rates, leaves, jitter=0.5, seed=seed)


@pytest.mark.parametrize("leaves", [(), ("s1", "s1", "s2", "s2")], ids=["unknown", "known"])
@pytest.mark.parametrize("seed", range(8))
def test_the_cluster_of_the_walk(leaves: tuple[str, ...], seed: int) -> None:
    report = of_the_walk(leaves, seed).surveyed()
    assert said(report) == [("node-slow", ("n4",), True)] and ledger(report) == {"n4"}
    assert " MB/s at most, with anybody; the other pairs have " in report.diagnoses[0].evidence


@pytest.mark.parametrize("seeds", PROOF)
def test_a_slow_node_is_named_and_nobody_else(seeds: range) -> None:
    wrong = {}
    for seed in seeds:
        each = drawn(seed, "node")
        report = each.cluster.surveyed()
        sure = [found for found in said(report) if found[2]]
        if sure != [("node-slow", (each.name,), True)] or ledger(report) != {each.name}:
            wrong[seed] = each.name, said(report)
    assert not wrong


@pytest.mark.parametrize("seeds", PROOF)
def test_a_slow_link_is_named_and_no_other_node_is_blamed(seeds: range) -> None:
    """A pair alone says less than all of a node: clearly slow is fourfold."""
    missed, wrong = {}, {}
    for seed in seeds:
        each = drawn(seed, "link", least=4.0)
        assert each.name is not None
        report = each.cluster.surveyed()
        if ("link-slow", (each.name,), True) not in said(report):
            missed[seed] = each.name, said(report)
        if not ledger(report) <= {*each.name.split("–")}:
            wrong[seed] = each.name, said(report)
    assert not wrong and len(missed) <= len(seeds) // 50, (wrong, missed)


@pytest.mark.parametrize("seeds", PROOF)
def test_nobody_gets_into_the_ledger_where_pairs_differ_by_nature(seeds: range) -> None:
    """A few nodes may be alike, and far from the others, by chance (``uneven.CHANCE``): somebody is named in 2 of 800."""
    reports = {seed: drawn(seed, None).cluster.surveyed() for seed in seeds}
    wrong = {seed: said(report) for seed, report in reports.items() if ledger(report)}
    assert len(wrong) <= len(seeds) // 100, wrong


def test_without_the_spread_the_innocent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the suspects of the fit as they are."""
    monkeypatch.setattr(verdict, "weighed", lambda suspects, *_: suspects)
    assert sum(bool(ledger(drawn(seed, None).cluster.surveyed())) for seed in range(COVER)) >= 2
