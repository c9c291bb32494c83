"""``doctor.html``: a survey as one self-contained page. Separate from the report, so that Jinja is loaded only for the page."""

from pathlib import Path

from hpc_mp.base.text import counted, data_rate, moment
from hpc_mp.doctor.survey.figures import LABEL, bars, matrix, switches
from hpc_mp.doctor.survey.report import Report, drain_commands
from hpc_mp.report.html import filled, publish

TEMPLATE = Path(__file__).resolve().with_name("page.html.j2")


def write_page(path: Path, report: Report) -> None:
    """Write the page atomically, for all users: it tells of the cluster. Raises HpcMpError if it cannot be written."""
    publish(path, render(report), None, "--html")


def render(report: Report) -> str:
    """Render the page. All text from the nodes is escaped."""
    evidence, verdict = report.evidence, report.verdict
    moved = {name: ", ".join(f"{counter} +{count}" for counter, count in evidence.counters.get(node, {}).items())
             for node, name in enumerate(evidence.nodes)}
    return filled(
        TEMPLATE, report.time + report.seconds, verb="doctor", report=report, title=report.cluster or "cluster",
        when=moment(report.time), state=_state(report), nodes=evidence.facts, moved=moved,
        rounds=verdict.rounds if verdict else 0, expected=data_rate(verdict.expected) if verdict and verdict.expected else None,
        drains=drain_commands(report.diagnoses), heat=matrix(report), bars=bars(report), tree=switches(report), label=LABEL)


def _state(report: Report) -> dict[str, str]:
    count = len(report.diagnoses)
    if not count and not report.sound:
        return {"kind": "bad", "words": "nodes with errors"}
    if count:
        kind = "bad" if any(diagnosis.certain for diagnosis in report.diagnoses) else "warn"
        return {"kind": kind, "words": counted(count, "fault")}
    return {"kind": "good", "words": "healthy"} if report.complete else {"kind": "warn", "words": "interrupted"}
