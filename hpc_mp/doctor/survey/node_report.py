"""The report of every node of a survey: findings of its own checks, its traits, and the speed of its devices."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from hpc_mp.base.findings import Finding, Severity, weight
from hpc_mp.cluster.node.source import here
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.doctor.checks.registry import PASSIVE
from hpc_mp.doctor.compute import Result, devices_here, judge, measure
from hpc_mp.doctor.drift import drift, traits
from hpc_mp.doctor.node import DEADLINE_S, diagnose

# Without the control group: the agent's is that of a step with one task, not that of a future job.
CODES = tuple(check.code for check in PASSIVE if not check.code.startswith("cgroup-"))
REPORTED: tuple[Severity, ...] = ("error", "warning")
REPORT_S = 3 * DEADLINE_S
COMPUTE_S = 300.0  # beyond the seconds of load: torch's start from a slow file system, CUDA's, and copies one after the other


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The report of one node: warnings and errors of its checks, its traits (see ``drift``), and results of its devices."""

    findings: tuple[Finding, ...] = ()
    traits: Mapping[str, str] = field(default_factory=dict)
    results: tuple[Result, ...] = ()

    def and_also(self, findings: Iterable[Finding]) -> Self:
        """Return a copy with more findings. Of findings with the same code and subject the first is kept."""
        firsts = {(finding.code, finding.subject): finding for finding in (*findings, *self.findings[::-1])}
        return replace(self, findings=tuple(firsts.values()))


@dataclass(frozen=True, slots=True)
class SharedFinding:
    """A finding of several nodes; ``finding`` is that of the first. ``who``: the nodes as text, ``n[1-3]`` or ``n2 cuda:5``."""

    who: str
    nodes: tuple[str, ...]
    finding: Finding


def node_report(node: str, seconds: float) -> NodeReport:
    """Return the report of this node. ``seconds``: duration of load for each kind of work; 0: no load."""
    source = here()
    results = measure(devices_here(source), seconds, source=source) if seconds else ()
    findings = tuple(finding for finding in diagnose(source, CODES) if finding.severity in REPORTED)
    return NodeReport(findings, traits(source), tuple(replace(result, host=node) for result in results))


def conclusions(reports: Mapping[str, NodeReport]) -> tuple[SharedFinding, ...]:
    """Return the nodes' findings with equal ones merged, drift between nodes, and devices that compute slower or differently. The
    gravest first."""
    grouped: dict[tuple[str, Severity, str], list[tuple[str, Finding]]] = defaultdict(list)
    for node, report in reports.items():
        for finding in report.findings:
            grouped[finding.code, finding.severity, finding.fix].append((node, finding))
    merged = []
    for group in grouped.values():
        nodes = tuple(dict.fromkeys(node for node, _ in group))
        merged.append(SharedFinding(compress(nodes), nodes, _first([finding for node, finding in group if node == nodes[0]])))
    results = [result for report in reports.values() for result in report.results]
    together = [*drift({node: report.traits for node, report in reports.items()}), *judge(results)]
    compared = [SharedFinding(finding.subject, tuple(_named(finding, reports)), finding)
                for finding in together if finding.severity in REPORTED]
    return tuple(sorted((*merged, *compared), key=lambda noted: weight(noted.finding)))


def faulty(noted: tuple[SharedFinding, ...], nodes: int) -> Iterator[tuple[str, Finding]]:
    """Yield nodes with an error that fewer than half of the nodes have: a common error is no reason to avoid some nodes."""
    for shared in noted:
        if shared.finding.severity == "error" and 2 * len(shared.nodes) < nodes:
            yield from ((node, shared.finding) for node in shared.nodes)


def _first(same: Sequence[Finding]) -> Finding:
    """Return the first of several equal findings of one node, with its subject and the number of the others in the message."""
    first, more = same[0], f" (and {len(same) - 1} more)" if len(same) > 1 else ""
    text = f"{first.subject}: {first.message}" if first.subject else first.message
    return replace(first, message=text + more)


def _named(finding: Finding, reports: Mapping[str, NodeReport]) -> Iterator[str]:
    """Yield the nodes in a subject such as ``n3, n4`` or ``n3 cuda:5, n4 cpu``."""
    names = [part.partition(" ")[0] for part in finding.subject.split(", ")]
    return (node for node in dict.fromkeys(names) if node in reports)
