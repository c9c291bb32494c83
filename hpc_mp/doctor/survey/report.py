"""The results of a survey, as one document."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hpc_mp.doctor.localise import Localisation
from hpc_mp.doctor.survey.diagnosis import Diagnosis
from hpc_mp.doctor.survey.evidence import SurveyEvidence
from hpc_mp.doctor.survey.node_report import SharedFinding, conclusions


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a survey, complete or interrupted."""

    cluster: str | None  # its name in Slurm; None if Slurm does not report it
    time: float  # unix time of the start in seconds
    seconds: float
    evidence: SurveyEvidence
    verdict: Localisation | None
    diagnoses: tuple[Diagnosis, ...]
    complete: bool  # True if nothing was left to measure

    @property
    def noted(self) -> tuple[SharedFinding, ...]:
        """Findings of the nodes' own checks, drift between nodes, and findings on devices under load."""
        return conclusions({self.evidence.nodes[node]: report for node, report in sorted(self.evidence.reports.items())})

    @property
    def sound(self) -> bool:
        """True if no fault and no error was found."""
        return not self.diagnoses and all(noted.finding.severity != "error" for noted in self.noted)

    @property
    def rates(self) -> dict[tuple[int, int, int], float | None]:
        """Rates in GB/s by sender, receiver and rail: the median of all transfers at full speed, None if none succeeded."""
        grouped: dict[tuple[int, int, int], list[float]] = {}
        for leg in self.evidence.legs:
            if not leg.paced:
                grouped.setdefault((leg.sender, leg.receiver, leg.rail), []).extend([] if leg.rate is None else [leg.rate])
        return {key: median(rates) if rates else None for key, rates in grouped.items()}

    def document(self) -> dict[str, Any]:
        """Return the document for ``--json``."""
        evidence = self.evidence
        return {
            "cluster": self.cluster, "time": self.time, "seconds": self.seconds, "complete": self.complete,
            "nodes": [asdict(facts) for facts in evidence.facts], "leaves": dict(evidence.leaves),
            "absent": {node: absence.why for node, absence in evidence.absent.items()},
            "expected": self.verdict.expected if self.verdict else None, "rounds": self.verdict.rounds if self.verdict else 0,
            "diagnoses": [asdict(diagnosis) | {"remedy": diagnosis.remedy} for diagnosis in self.diagnoses],
            "checks": [{"nodes": list(noted.nodes), **noted.finding.document()} for noted in self.noted],
            "pairs": [[evidence.nodes[a], evidence.nodes[b], rail, rate] for (a, b, rail), rate in self.rates.items()],
            "counters": {evidence.nodes[node]: moved for node, moved in evidence.counters.items() if moved},
        }


