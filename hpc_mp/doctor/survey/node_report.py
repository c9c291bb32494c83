"""What every node of a survey says of itself: what its own checks find, what it is, and how its devices compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from hpc_mp.base.findings import Finding, Severity, weight
from hpc_mp.cluster.node.source import here
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.doctor.checks.registry import PASSIVE
from hpc_mp.doctor.compute import Result, devices_here, judge, measure
from hpc_mp.doctor.drift import drift, traits
from hpc_mp.doctor.node import DEADLINE_S, diagnose

# Not the control group: ours is that of a step with one task, and says nothing of what a job will be granted.
CODES = tuple(check.code for check in PASSIVE if not check.code.startswith("cgroup-"))
REPORTED: tuple[Severity, ...] = ("error", "warning")
REPORT_S = 3 * DEADLINE_S
COMPUTE_S = 300.0
"""Beyond the seconds of load: torch's start from a slow file system, CUDA's, and copies one after the other."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node. ``findings``: warnings and errors of its checks; ``traits``: see ``drift``; ``results``: of its devices."""

    findings: tuple[Finding, ...] = ()
    traits: Mapping[str, str] = field(default_factory=dict)
    results: tuple[Result, ...] = ()

    def and_also(self, found: Iterable[Finding]) -> Self:
        """With more findings; of those of the same code and subject the first."""
        firsts = {(finding.code, finding.subject): finding for finding in (*found, *self.findings[::-1])}
        return replace(self, findings=tuple(firsts.values()))

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"findings": [finding.document() for finding in self.findings]}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        return cls(tuple(map(Finding.read, document["findings"])), document["traits"],
                   tuple(map(Result.read, document["results"])))


@dataclass(frozen=True, slots=True)
class SharedFinding:
    """A finding, and the nodes that have it; ``finding`` is the first one's. ``who``: in words, ``n[1-3]`` or ``n2 cuda:5``."""

    who: str
    nodes: tuple[str, ...]
    finding: Finding


def node_report(node: str, seconds: float) -> NodeReport:
    """Of this node. ``seconds``: of load for each kind of work; 0: nothing is computed."""
    source = here()
    results = measure(devices_here(source), seconds, source=source) if seconds else ()
    findings = tuple(finding for finding in diagnose(source, CODES) if finding.severity in REPORTED)
    return NodeReport(findings, traits(source), tuple(replace(result, host=node) for result in results))


def conclusions(reports: Mapping[str, NodeReport]) -> tuple[SharedFinding, ...]:
    """What the nodes' checks say, equal findings together; how nodes differ; who computes slower, or something else.

    The gravest first.
    """
    grouped: dict[tuple[str, Severity, str], list[tuple[str, Finding]]] = defaultdict(list)
    for node, seen in reports.items():
        for finding in seen.findings:
            grouped[finding.code, finding.severity, finding.fix].append((node, finding))
    own = []
    for found in grouped.values():
        nodes = tuple(dict.fromkeys(node for node, _ in found))
        own.append(SharedFinding(compress(nodes), nodes, _first([finding for node, finding in found if node == nodes[0]])))
    results = [result for seen in reports.values() for result in seen.results]
    together = [*drift({node: seen.traits for node, seen in reports.items()}), *judge(results)]
    compared = [SharedFinding(finding.subject, tuple(_named(finding, reports)), finding)
                for finding in together if finding.severity in REPORTED]
    return tuple(sorted((*own, *compared), key=lambda noted: weight(noted.finding)))


def faulty(noted: tuple[SharedFinding, ...], nodes: int) -> Iterator[tuple[str, Finding]]:
    """Nodes with an error that most do not have: what is so everywhere is no reason to avoid some of them."""
    for each in noted:
        if each.finding.severity == "error" and 2 * len(each.nodes) < nodes:
            yield from ((node, each.finding) for node in each.nodes)


def _first(same: Sequence[Finding]) -> Finding:
    """Of several such findings of one node the first, with its subject, and how many more there are."""
    first, more = same[0], f" (and {len(same) - 1} more)" if len(same) > 1 else ""
    words = f"{first.subject}: {first.message}" if first.subject else first.message
    return replace(first, message=words + more)


def _named(finding: Finding, reports: Mapping[str, NodeReport]) -> Iterator[str]:
    """The nodes in a subject such as ``n3, n4`` or ``n3 cuda:5, n4 cpu``."""
    words = [part.partition(" ")[0] for part in finding.subject.split(", ")]
    return (node for node in dict.fromkeys(words) if node in reports)
