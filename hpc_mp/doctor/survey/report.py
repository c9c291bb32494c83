"""The results of a survey as one document, and their consequences: nodes that launch avoids, drain reasons, rates for planner and
placement."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hpc_mp.base.grouping import grouped
from hpc_mp.cluster.bad_nodes import AVOIDED_S, BadNode, ledger, record, take_back
from hpc_mp.cluster.bad_nodes import findings as held_against
from hpc_mp.cluster.bandwidth import LinkRates, where, write_measured
from hpc_mp.cluster.slurm.records import drain_command
from hpc_mp.doctor.localise import Localisation, nodes_of
from hpc_mp.doctor.survey.diagnosis import REMEDIES, Diagnosis
from hpc_mp.doctor.survey.evidence import SurveyEvidence
from hpc_mp.doctor.survey.node_report import CODES, SharedFinding, conclusions, faulty


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
        rates = grouped(((leg.sender, leg.receiver, leg.rail), leg.rate) for leg in self.evidence.legs if not leg.paced)
        return {key: median(successes) if (successes := [rate for rate in of_leg if rate is not None]) else None
                for key, of_leg in rates.items()}

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


GONE = ("lost", "node")  # codes that runs record for a vanished node; a survey that the node answers at full speed disproves them
COMPUTED = {"node-corrupt"}  # codes that transfers cannot show
LONGEST_REASON = 120  # characters of evidence in a drain reason, which sinfo shows in one line


def remember(report: Report, environ: Mapping[str, str] = os.environ) -> tuple[BadNode, ...]:
    """Write the results for ``hpc-mp launch``: bad nodes into the ledger, rates into cluster.json. Ledger entries that the
    survey disproves are withdrawn. Return the findings written to the ledger. Raises OSError if a file cannot be written.

    Nothing is written for a cluster without a name. After an interrupted survey no rates are written and nothing is withdrawn.
    """
    if report.cluster is None:
        return ()
    bad_nodes = findings(report)
    path = ledger(report.cluster, environ)
    for finding in disproved(report, held_against(path, report.time)):
        take_back(path, [finding.node], [finding.code], report.time)
    if bad_nodes:
        record(path, bad_nodes)
    if report.complete:
        write_measured(where(report.cluster, environ), measured(report))
    return bad_nodes


def findings(report: Report) -> tuple[BadNode, ...]:
    """Return a finding for every node that is certainly bad, and for one end of every bad link, which suffices to avoid it."""
    bad = {node: (finding.code, finding.message) for node, finding in faulty(report.noted, len(report.evidence.nodes))}
    bad |= {node: (diagnosis.code, _evidence(diagnosis)) for node, diagnosis in to_avoid(report.diagnoses).items()}
    until = report.time + AVOIDED_S
    return tuple(BadNode(node, code, evidence, "hpc-mp doctor", report.time, until, "certain")
                 for node, (code, evidence) in bad.items())


def disproved(report: Report, held: Iterable[BadNode]) -> tuple[BadNode, ...]:
    """Return the ledger entries that this survey disproves: it measured that kind of fault there and did not find it.

    These are faults of nodes and the network, of links with both ends measured, and of the nodes' own checks. Faults of
    devices under load and entries by people are never disproved.
    """
    if not report.complete:
        return ()
    evidence = report.evidence
    answered = {node for node in evidence.nodes if node not in evidence.absent}
    reported = {evidence.nodes[node] for node in evidence.reports}
    paired = {evidence.nodes[node] for leg in evidence.legs if leg.rate is not None for node in leg.pair}
    suspects = {name for diagnosis in report.diagnoses for name in nodes_of(diagnosis.members)}
    suspects |= {node for noted in report.noted if noted.finding.severity == "error" for node in noted.nodes}

    def measured_there(finding: BadNode) -> bool:
        if finding.code in CODES:
            return finding.node in reported
        ends = {*nodes_of([finding.evidence.partition(":")[0]])} if finding.code.startswith("link") else set()
        return (finding.code in {*REMEDIES, *GONE} - COMPUTED) and {finding.node, *ends} <= paired

    return tuple(item for item in held if item.time <= report.time and item.node in answered - suspects and measured_there(item))


def to_avoid(diagnoses: Iterable[Diagnosis]) -> dict[str, Diagnosis]:
    """Return the diagnosis by node to avoid. For bad links, nodes with the most bad links come first. Uplinks and ambiguous
    sets of suspects are left to people.
    """
    certain = [diagnosis for diagnosis in diagnoses if diagnosis.certain]
    avoided = {nodes_of(diagnosis.members)[0]: diagnosis for diagnosis in reversed(certain)
               if diagnosis.code.startswith(("node", "rail"))}
    links = [diagnosis for diagnosis in certain if diagnosis.code.startswith("link")]
    while remaining := [link for link in links if not avoided.keys() & {*nodes_of(link.members)}]:
        count = Counter(node for link in remaining for node in nodes_of(link.members))
        node = max(sorted(count, reverse=True), key=lambda node: count[node])
        avoided[node] = next(link for link in remaining if node in nodes_of(link.members))
    return avoided


def drain_commands(diagnoses: Iterable[Diagnosis]) -> list[str]:
    """Return commands for an administrator's shell; monitors can parse the reason: ``hpc-mp:CODE:evidence``."""
    return [drain_command(node, f"hpc-mp:{diagnosis.code}:{_plain(diagnosis.evidence)}")
            for node, diagnosis in to_avoid(diagnoses).items()]


def measured(report: Report) -> LinkRates:
    """Return the rates of pairs of which both directions succeeded, summed over all rails, and the platform of most nodes."""
    rails, rates, evidence = report.evidence.rails, report.rates, report.evidence
    pairs = []
    for a, b in sorted({leg.pair for leg in evidence.legs}):
        directions = [[rates.get((*way, rail)) for rail in range(rails)] for way in ((a, b), (b, a))]
        successes = [[rate for rate in way if rate is not None] for way in directions]
        if all(len(way) == rails for way in successes):
            pairs.append((a, b, min(map(sum, successes))))
    platform, _ = Counter(facts.platform for facts in evidence.facts).most_common(1)[0]
    return LinkRates(report.cluster or "", report.time, evidence.nodes, tuple(pairs), platform)


def _evidence(diagnosis: Diagnosis) -> str:
    """Return the evidence, for a link prefixed with its name: the ledger entry would else not name its other end."""
    return f"{diagnosis.subject}: {diagnosis.evidence}" if diagnosis.code.startswith("link") else diagnosis.evidence


def _plain(text: str) -> str:
    """Return the text without characters that are special to a shell or to Slurm, cut to ``LONGEST_REASON``."""
    return "".join(letter for letter in text if letter.isalnum() or letter in " .,:%/-")[:LONGEST_REASON]
