"""What follows from a survey: nodes that launch leaves out, reasons to drain, rates for planner and placement."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median

from hpc_mp.cluster.bad_nodes import BadNode, ledger, record
from hpc_mp.cluster.bandwidth import LinkRates, where, write_measured
from hpc_mp.cluster.slurm.drain import drain_command
from hpc_mp.doctor.survey.diagnosis import LINK, Diagnosis
from hpc_mp.doctor.survey.node_report import faulty
from hpc_mp.doctor.survey.report import Report

AVOIDED_S = 24 * 3600.0
LONGEST_REASON = 120  # characters of evidence in a drain reason: sinfo shows them in one line


def remember(report: Report, environ: Mapping[str, str] = os.environ) -> tuple[BadNode, ...]:
    """Write what was found where ``hpc-mp launch`` looks: bad nodes into the ledger, rates into cluster.json.

    Nothing is written for a cluster without a name, and no rates after an interrupted survey.

    Returns:
        What went into the ledger.

    Raises:
        OSError: it cannot be written.
    """
    if report.cluster is None:
        return ()
    found = findings(report)
    if found:
        record(ledger(report.cluster, environ), found)
    if report.complete:
        write_measured(where(report.cluster, environ), measured(report))
    return found


def findings(report: Report) -> tuple[BadNode, ...]:
    """A finding for every node that is bad for certain, and for one end of every bad link: that suffices to avoid it."""
    bad = {node: (found.code, found.message) for node, found in faulty(report.noted, len(report.evidence.nodes))}
    bad |= {node: (found.code, found.evidence) for node, found in to_avoid(report.diagnoses).items()}
    until = report.time + AVOIDED_S
    return tuple(BadNode(node, code, evidence, "hpc-mp doctor", report.time, until) for node, (code, evidence) in bad.items())


def to_avoid(diagnoses: Iterable[Diagnosis]) -> dict[str, Diagnosis]:
    """Node → why. Of bad links, the nodes with most of them first. Honest sets and uplinks are left to people."""
    certain = [diagnosis for diagnosis in diagnoses if diagnosis.certain]
    avoided = {_node(diagnosis): diagnosis for diagnosis in reversed(certain) if diagnosis.code.startswith(("node", "rail"))}
    links = [diagnosis for diagnosis in certain if diagnosis.code.startswith("link")]
    while left := [link for link in links if not avoided.keys() & {*link.members[0].split(LINK)}]:
        count = Counter(node for link in left for node in link.members[0].split(LINK))
        node = max(sorted(count, reverse=True), key=lambda node: count[node])
        avoided[node] = next(link for link in left if node in link.members[0].split(LINK))
    return avoided


def drain_commands(diagnoses: Iterable[Diagnosis]) -> list[str]:
    """For an administrator's shell; monitors can read the reason: ``hpc-mp:CODE:evidence``."""
    return [drain_command(node, f"hpc-mp:{diagnosis.code}:{_plain(diagnosis.evidence)}")
            for node, diagnosis in to_avoid(diagnoses).items()]


def measured(report: Report) -> LinkRates:
    """Pairs of which both directions succeeded, all rails together; the platform that most nodes look like."""
    rails, rates, seen = report.evidence.rails, report.rates, report.evidence
    pairs = []
    for a, b in sorted({leg.pair for leg in seen.legs}):
        directions = [[rates.get((*way, rail)) for rail in range(rails)] for way in ((a, b), (b, a))]
        known = [[rate for rate in way if rate is not None] for way in directions]
        if all(len(way) == rails for way in known):
            pairs.append((a, b, min(map(sum, known))))
    latencies = [leg.latency for leg in seen.legs if leg.latency is not None]
    latency = median(latencies) if latencies else None
    platform, _ = Counter(facts.platform for facts in seen.facts).most_common(1)[0]
    return LinkRates(report.cluster or "", report.time, seen.nodes, tuple(pairs), latency, platform)


def _node(diagnosis: Diagnosis) -> str:
    return diagnosis.members[0].partition(" rail ")[0]


def _plain(text: str) -> str:
    """Without what a shell or Slurm would take for its own."""
    return "".join(letter for letter in text if letter.isalnum() or letter in " .,:%/-")[:LONGEST_REASON]
