"""Measurements of the coordinator, each one order to the agents; the answers are kept as evidence."""

import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, mode

from hpc_mp.base.findings import Finding
from hpc_mp.base.grouping import grouped
from hpc_mp.doctor.localise import RailSample
from hpc_mp.doctor.survey.agents import AgentPool, Message, read
from hpc_mp.doctor.survey.evidence import Computed, Echo, Leg, Pair, SurveyEvidence
from hpc_mp.doctor.survey.node_report import COMPUTE_S, REPORT_S, NodeReport
from hpc_mp.doctor.survey.transfer import PACKET, Probed, TransferPlan

COUNTED_S = 0.4  # counted seconds of a transfer
PACED_S = 0.5
PACKETS = (1000, 3000)  # per second of a paced transfer: 8 to 25 Mbit/s
PACED_SHARE = 0.25  # of the slowest measured rate, within these bounds
PATIENCE_S = 2.5  # attempts of TCP to connect at 0 and 1 s, with newer kernels at 2 s too
PROBE_S = 5.0
STREAM_MBIT = 10_000  # link speed per connection
MOST_STREAMS = 8
GIVEN_UP = 2  # consecutive unanswered orders after which a node is no longer awaited


class Measurements:
    """Measurements with a pool of agents. ``ranks``: agent of each of ``evidence.nodes``; ``load_seconds``: see ``report``."""

    def __init__(self, crew: AgentPool, ranks: Sequence[int], evidence: SurveyEvidence, load_seconds: float = 0.0) -> None:
        self._crew, self.ranks, self.evidence, self._load_seconds = crew, ranks, evidence, load_seconds
        self._token = secrets.token_hex(8)
        self._missed: Counter[int] = Counter()
        speed = median(interface.speed for facts in evidence.facts for interface in facts.interfaces)
        self._streams = max(1, min(MOST_STREAMS, round(speed / STREAM_MBIT)))
        self.sizes = [mode(facts.interfaces[rail].mtu for facts in evidence.facts) for rail in range(evidence.rails)]
        book: list[tuple[list[str], int] | None] = [None] * (max(ranks) + 1)
        for rank, facts in zip(ranks, evidence.facts, strict=True):
            book[rank] = [interface.address for interface in facts.interfaces], facts.port
        crew.order({"do": "meet", "token": self._token, "book": book}, (), 0.0)

    @property
    def rails(self) -> int:
        """The number of rails that ``bandwidth`` measures separately."""
        return self.evidence.rails

    def report(self) -> None:
        """Collect the report of every node: its checks, its traits and, if ``load_seconds`` > 0, its devices under load."""
        everyone, order = range(len(self.evidence.nodes)), {"do": "report", "seconds": self._load_seconds}
        answers = self.order(order, everyone, REPORT_S + (COMPUTE_S if self._load_seconds else 0.0))
        self.evidence.reports.update({node: read(NodeReport, answer["seen"]) for node, answer in answers.items()})

    def bandwidth(self, pairs: Sequence[Pair]) -> list[RailSample]:
        """Measure one round of disjoint pairs at the same time."""
        return samples_of(self._transfer(pairs, COUNTED_S, 0))

    def paced(self, pairs: Sequence[Pair]) -> list[Leg]:
        """Measure one round of disjoint pairs at a low rate, at which only a fault loses segments."""
        slowest = min((leg.rate for leg in self.evidence.legs if leg.rate and not leg.paced), default=float("inf"))
        lower, upper = PACKETS
        return self._transfer(pairs, PACED_S, round(max(lower, min(upper, PACED_SHARE * slowest * 1e9 / PACKET))))

    def probe(self, peers: Mapping[int, Sequence[int]]) -> list[Echo]:
        """Send full-size packets from nodes to some of their peers, all at the same time."""
        targets = {str(self.ranks[node]): [self.ranks[peer] for peer in others] for node, others in peers.items()}
        answers = self.order({"do": "probe", "peers": targets, "sizes": self.sizes}, peers, PROBE_S)
        node_of = {str(rank): node for node, rank in enumerate(self.ranks)}
        echoes = [Echo(node, node_of[peer], int(rail), Probed(**counts)) for node, answer in answers.items()
                  for rail, by_peer in answer["rails"].items() for peer, counts in by_peer.items()]
        self.evidence.echoes += echoes
        return echoes

    def compute(self, nodes: Collection[int], seconds: float) -> Mapping[int, Computed]:
        """Let the nodes compute at the same time and return their results."""
        answers = self.order({"do": "compute", "ranks": [self.ranks[node] for node in nodes], "seconds": seconds}, nodes,
                              5 * seconds + 5.0)
        trial = {node: read(Computed, answer) for node, answer in answers.items()}
        self.evidence.trials.append(trial)
        return trial

    def counters(self) -> dict[int, dict[str, int]]:
        """Return errors and drops of every node's interfaces since it started."""
        everyone = range(len(self.evidence.nodes))
        return {node: answer["counters"] for node, answer in self.order({"do": "counters"}, everyone, PROBE_S).items()}

    def _transfer(self, pairs: Sequence[Pair], seconds: float, packets: int) -> list[Leg]:
        nodes = [node for pair in pairs for node in pair]
        plan = TransferPlan(self._token, 0, seconds, PATIENCE_S, self._streams, packets)
        order = {"do": "transfer", "pairs": [[self.ranks[node] for node in pair] for pair in pairs], "seconds": seconds,
                 "patience": PATIENCE_S, "streams": self._streams if not packets else 1, "packets": packets}
        answers = self.order(order, nodes, plan.within)
        legs = [leg for pair in pairs for rail in range(self.evidence.rails) for leg in legs_of(pair, rail, answers, packets > 0)]
        self.evidence.legs += legs
        return legs

    def order(self, order: Message, nodes: Iterable[int], within: float) -> dict[int, Message]:
        """Return the answers by node. Nodes that missed the last orders may answer, but are not awaited."""
        node_of = {self.ranks[node]: node for node in nodes}
        awaited = [rank for rank, node in node_of.items() if self._missed[node] < GIVEN_UP]
        answers = {node_of[rank]: answer for rank, answer in self._crew.order(order, awaited, within).items() if rank in node_of}
        for node in node_of.values():
            self._missed[node] = 0 if node in answers else self._missed[node] + 1
        return answers


def legs_of(pair: Pair, rail: int, answers: Mapping[int, Message], paced: bool = False) -> list[Leg]:
    """Return both directions of one pair on one rail, from the answers of its two ends; the first of the pair calls."""
    both = [end for node in pair if node in answers for end in answers[node]["ends"] if end["rail"] == rail]
    legs = []
    for direction, (sender, receiver) in enumerate((pair, pair[::-1])):
        ends = [end for end in both if end["direction"] == direction]
        why = next((end["why"] for end in ends if "why" in end), "" if ends else "not tried")
        if not answers.keys() >= {*pair}:
            why = "no answer from the agent"
        legs.append(Leg(
            sender, receiver, rail, rate=None if why else sum(end.get("rate", 0.0) for end in ends) / 1e9,
            segments=sum(end.get("segments", 0) for end in ends), lost=sum(end.get("lost", 0) for end in ends),
            paced=paced, why=why))
    return legs


def samples_of(legs: Iterable[Leg]) -> list[RailSample]:
    """Return the slower direction of every pair on every rail, as ``localise.Measure`` requires."""
    rates = grouped(((leg.pair, leg.rail), leg.rate) for leg in legs)
    return [RailSample(pair, rail, None if None in both else min(rate for rate in both if rate is not None))
            for (pair, rail), both in rates.items()]


GPU_SIZE = 256 << 20  # bytes: NCCL reaches its full rate from about 64 MiB on
GPU_MESSAGES = 10
GPU_PATIENCE_S = 60.0  # torch and NCCL are slow to start


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs to measure with: ``count`` GPUs of every node, over ``backend``."""

    count: int
    backend: str = "nccl"
    size: int = GPU_SIZE
    messages: int = GPU_MESSAGES


class GpuMeasurements(Measurements):
    """Measurements of the bandwidth between GPUs."""

    def __init__(self, crew: AgentPool, ranks: Sequence[int], evidence: SurveyEvidence, gpus: Gpus,
                 load_seconds: float = 0.0) -> None:
        super().__init__(crew, ranks, evidence, load_seconds)
        self._gpus = gpus

    @property
    def rails(self) -> int:
        return self._gpus.count

    def bandwidth(self, pairs: Sequence[Pair]) -> list[RailSample]:
        """Measure one round of disjoint pairs; GPU g of a node sends to GPU g of the other."""
        nodes = [node for pair in pairs for node in pair]
        ports = self.order({"do": "ports", "count": self.rails}, nodes, GPU_PATIENCE_S)
        ready = [pair for pair in pairs if pair[0] in ports]
        order = {"do": "gpus", **asdict(self._gpus), "patience": GPU_PATIENCE_S,
                 "pairs": [[self.ranks[a], self.ranks[b], ports[a]["ports"]] for a, b in ready]}
        answers = self.order(order, nodes, 2 * GPU_PATIENCE_S)
        for node, answer in answers.items():
            report = self.evidence.reports.get(node, NodeReport())
            self.evidence.reports[node] = report.and_also(read(tuple[Finding, ...], answer["found"]))
        legs = [leg for pair in pairs for rail in range(self.rails) for leg in legs_of(pair, rail, answers)]
        self.evidence.legs += legs
        return samples_of(legs)
