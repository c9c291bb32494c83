"""``doctor.html``: a survey as one self-contained page. Separate from the report, so that Jinja is loaded only for the page."""

from __future__ import annotations

import os
import time
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hpc_mp import __version__
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted, data_rate
from hpc_mp.doctor.survey.actions import drain_commands
from hpc_mp.doctor.survey.figures import LABEL, bars, matrix, switches
from hpc_mp.doctor.survey.report import Report

HERE = Path(__file__).resolve().parent


def write_page(path: Path, report: Report) -> None:
    """Write the page atomically. Raises HpcMpError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(render(report), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise HpcMpError(f"page {path}", f"cannot be written ({error.strerror})", "name another place with --html") from None


def render(report: Report) -> str:
    """Render the page. All text from the nodes is escaped."""
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)
    environment.filters["rate"] = data_rate
    evidence, verdict = report.evidence, report.verdict
    moved = {name: ", ".join(f"{counter} +{count}" for counter, count in evidence.counters.get(node, {}).items())
             for node, name in enumerate(evidence.nodes)}
    return environment.get_template("page.html.j2").render(
        report=report, title=report.cluster or "cluster", when=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.time)),
        state=_state(report), nodes=evidence.facts, moved=moved, rounds=verdict.rounds if verdict else 0,
        expected=data_rate(verdict.expected) if verdict and verdict.expected else None, drains=drain_commands(report.diagnoses),
        heat=matrix(report), bars=bars(report), tree=switches(report), label=LABEL, version=__version__,
        style=(HERE / "page.css").read_text(encoding="utf-8"))


def _state(report: Report) -> dict[str, str]:
    count = len(report.diagnoses)
    if not count and not report.sound:
        return {"kind": "bad", "words": "nodes with errors"}
    if count:
        kind = "bad" if any(diagnosis.certain for diagnosis in report.diagnoses) else "warn"
        return {"kind": kind, "words": counted(count, "fault")}
    return {"kind": "good", "words": "healthy"} if report.complete else {"kind": "warn", "words": "interrupted"}
