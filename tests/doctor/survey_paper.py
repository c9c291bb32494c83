"""A cluster on paper: instruments whose readings follow from planted faults, with noise."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_mp.doctor.localise import RailSample
from hpc_mp.doctor.survey.evidence import Computed, Echo, Interface, Leg, NodeFacts, Pair, SurveyEvidence
from hpc_mp.doctor.survey.node_report import NodeReport
from hpc_mp.doctor.survey.report import Report
from hpc_mp.doctor.survey.run import survey
from hpc_mp.doctor.survey.transfer import TRIES, Probed

RATE = 0.025  # GB/s
SEGMENTS = 9000
PACED = 2000
USUAL_MTU = 1500


@dataclass
class Faults:
    """Planted faults, by node or pair; nothing is wrong by default."""

    node_rate: Mapping[int, float] = field(default_factory=dict)
    pair_rate: Mapping[Pair, float] = field(default_factory=dict)
    leaf_rate: Mapping[str, float] = field(default_factory=dict)
    node_loss: Mapping[int, float] = field(default_factory=dict)
    pair_loss: Mapping[Pair, float] = field(default_factory=dict)
    cut: frozenset[Pair] = frozenset()
    hung: frozenset[int] = frozenset()
    cpu: Mapping[int, float] = field(default_factory=dict)
    cpu_slows_network: bool = False
    slow_cpu: Mapping[int, float] = field(default_factory=dict)  # a cap on its power, or heat: it gets all of a slower CPU
    others: Mapping[int, float] = field(default_factory=dict)  # the share of the CPU that what others run there leaves to a node
    busy: float = 1.0  # the least share of the CPU that foreign load leaves to a node in a window
    corrupt: frozenset[int] = frozenset()
    mtu: Mapping[int, int] = field(default_factory=dict)
    hole: frozenset[Pair] = frozenset()  # pairs between which full-size packets vanish
    reports: Mapping[int, NodeReport] = field(default_factory=dict)
    congestion: float = 0.0  # share of segments that full-speed transfers lose on healthy paths
    jitter: float = 1.0  # the least share of its rate that a transfer gets; 1: noise of one percent


class Paper:
    """Stands for ``Instruments``. ``leaves``: of the nodes n0, n1 …"""

    def __init__(self, count: int, faults: Faults, leaves: Sequence[str] = (), seed: int = 0) -> None:
        self.faults, self.dice = faults, random.Random(seed)
        names = tuple(f"n{node}" for node in range(count))
        links = [Interface("eth0", f"10.0.0.{node}", faults.mtu.get(node, USUAL_MTU), 10000) for node in range(count)]
        facts = tuple(NodeFacts(name, (link,), "EPYC", 4, 1) for name, link in zip(names, links, strict=True))
        self.leaves = dict(zip(names, leaves, strict=False))
        self.evidence = SurveyEvidence(names, facts, leaves=self.leaves)
        self.asked: list[str] = []
        self.rails = 1

    def counters(self) -> dict[int, dict[str, int]]:
        return {node: {"eth0.errin": 0} for node in range(len(self.evidence.nodes)) if node not in self.faults.hung}

    def report(self) -> None:
        self.evidence.reports.update({node: seen for node, seen in self.faults.reports.items() if node not in self.faults.hung})

    def compute(self, nodes: Collection[int], seconds: float) -> Mapping[int, Computed]:
        self.asked.append("compute")
        trial = {}
        for node in nodes:
            if node not in self.faults.hung:
                foreign = self.dice.uniform(self.faults.busy, 1.0) if self.faults.busy < 1 else 1.0
                share = min(self.faults.cpu.get(node, 1.0), self.faults.others.get(node, 1.0), foreign)
                slow = self.faults.slow_cpu.get(node, 1.0)
                trial[node] = Computed(1000 * share * slow, share, "bad" if node in self.faults.corrupt else "good",
                                       0.0 if node in self.faults.others else 1.9)
        self.evidence.trials.append(trial)
        return trial

    def probe(self, peers: Mapping[int, Sequence[int]]) -> list[Echo]:
        mtus = [facts.interfaces[0].mtu for facts in self.evidence.facts]
        for node, others in peers.items():
            for other in others:
                pair = min(node, other), max(node, other)
                small = 0 if pair in self.faults.cut or {*pair} & self.faults.hung else TRIES
                full = small if min(mtus[node], mtus[other]) >= USUAL_MTU and pair not in self.faults.hole else 0
                self.evidence.echoes.append(Echo(node, other, 0, Probed(small, full)))
        return self.evidence.echoes

    def bandwidth(self, pairs: Sequence[Pair]) -> list[RailSample]:
        self.asked.append("bandwidth")
        samples = []
        for pair in pairs:
            rates = [self._leg(way, pairs, paced=False) for way in (pair, pair[::-1])]
            samples.append(RailSample(pair, 0, None if None in rates else min(rates)))
        return samples

    def paced(self, pairs: Sequence[Pair]) -> list[Leg]:
        self.asked.append("paced")
        for pair in pairs:
            for way in (pair, pair[::-1]):
                self._leg(way, pairs, paced=True)
        return self.evidence.legs

    def _leg(self, way: Pair, pairs: Sequence[Pair], paced: bool) -> float | None:
        pair, faults = (min(way), max(way)), self.faults
        if pair in faults.cut or {*pair} & faults.hung:
            self.evidence.legs.append(Leg(*way, 0, None, paced=paced, why="timed out"))
            return None
        slow = [faults.node_rate.get(node, 1.0) for node in pair] + [faults.pair_rate.get(pair, 1.0)]
        slow += [faults.cpu.get(node, 1.0) * 2 for node in pair if faults.cpu_slows_network]
        slow += [share / self._crossing(leaf, pairs) for leaf, share in faults.leaf_rate.items() if self._leaves(pair, leaf)]
        loss = 1 - (1 - sum(faults.node_loss.get(node, 0.0) for node in pair)) * (1 - faults.pair_loss.get(pair, 0.0))
        noise = self.dice.uniform(faults.jitter, 1.0) if faults.jitter < 1 else self.dice.lognormvariate(0, 0.01)
        rate = RATE * min(1.0, *slow) * noise * (1 - min(0.5, loss * self.dice.uniform(0, 20)) if loss else 1.0)
        count = PACED if paced else SEGMENTS
        share = loss if paced else loss + faults.congestion
        lost = sum(self.dice.random() < share for _ in range(count)) if share else 0
        self.evidence.legs.append(Leg(*way, 0, rate, count, lost, paced=paced))
        return rate

    def _leaves(self, pair: Pair, leaf: str) -> bool:
        ends = [self.leaves[f"n{node}"] for node in pair]
        return leaf in ends and len({*ends}) > 1

    def _crossing(self, leaf: str, pairs: Sequence[Pair]) -> int:
        """How many pairs share that leaf's uplink in this round."""
        return sum(self._leaves(pair, leaf) for pair in pairs)


LEAVES = ("s1", "s1", "s2", "s2", "s3", "s3")


def made(faults: Faults, count: int = 6, cluster: str | None = "lab", steps: int | None = None,
         leaves: Sequence[str] = LEAVES, seed: int = 0) -> Report:
    paper = Paper(count, faults, leaves[:count], seed)
    states = [*survey(paper)][:steps]
    return Report(cluster, 1.7e9, 12.0, paper.evidence, states[-1].verdict, states[-1].diagnoses, states[-1].complete)
