"""Instruments whose bandwidth is that between GPUs, over NCCL: a GPU is a rail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hpc_mp.base.findings import Finding
from hpc_mp.doctor.localise import Sample
from hpc_mp.doctor.survey.agents import Crew
from hpc_mp.doctor.survey.evidence import Evidence, Leg, Pair, by_pair
from hpc_mp.doctor.survey.measurements import Instruments, legs_of, samples_of
from hpc_mp.doctor.survey.node_report import Look

SIZE = 256 << 20  # bytes: NCCL reaches its full rate from some 64 MiB on
MESSAGES = 10
PATIENCE_S = 60.0  # torch and NCCL take their time to start


@dataclass(frozen=True, slots=True)
class Gpus:
    """What to measure with: ``count`` GPUs of every node, over ``backend``."""

    count: int
    backend: str = "nccl"
    size: int = SIZE
    messages: int = MESSAGES


class GpuInstruments(Instruments):
    """Instruments whose bandwidth is that between GPUs."""

    def __init__(self, crew: Crew, ranks: Sequence[int], evidence: Evidence, gpus: Gpus, load_seconds: float = 0.0) -> None:
        super().__init__(crew, ranks, evidence, load_seconds)
        self._gpus = gpus

    @property
    def rails(self) -> int:
        return self._gpus.count

    def bandwidth(self, pairs: Sequence[Pair]) -> list[Sample]:
        """One round of disjoint pairs; GPU g of a node sends to GPU g of the other."""
        nodes = [node for pair in pairs for node in pair]
        ports = self.order({"do": "ports", "count": self.rails}, nodes, PATIENCE_S)
        ready = [pair for pair in pairs if pair[0] in ports]
        order = {"do": "gpus", **asdict(self._gpus), "patience": PATIENCE_S,
                 "pairs": [[self.ranks[a], self.ranks[b], ports[a]["ports"]] for a, b in ready]}
        answers = self.order(order, nodes, 2 * PATIENCE_S)
        for node, answer in answers.items():
            look = self.evidence.looks.get(node, Look())
            self.evidence.looks[node] = look.and_also(map(Finding.read, answer["found"]))
        legs: list[Leg] = [leg for pair in pairs for rail in range(self.rails)
                           for leg in legs_of(pair, rail, answers.get(pair[0]), answers.get(pair[1]), paced=False)]
        self.evidence.legs += legs
        grouped = by_pair(legs)
        return [sample for pair in pairs for sample in samples_of(pair, grouped[pair], self.rails)]
