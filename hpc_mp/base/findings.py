"""A finding: one statement about a machine, a file or a cluster. Linters, environment checks, the cluster description and the
doctor report in this form, on one scale of severity, in one JSON document.

The doctor packs this module into its health check, so it needs only Python 3.10 and the standard library.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

Severity = Literal["error", "warning", "unknown", "info", "ok"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "unknown", "info", "ok")
"""The gravest first. ``error``: wrong on any cluster, or broken here; ``warning``: it depends on the site or the case, or jobs
suffer; ``unknown``: a check could not see what it needs, and its message says why; ``info``: style, or good to know; ``ok``."""

NAGIOS: dict[Severity, int] = {"ok": 0, "info": 0, "warning": 1, "error": 2, "unknown": 3}
"""The exit codes of a Nagios plug-in: OK, WARNING, CRITICAL, UNKNOWN."""
NAGIOS_NAMES = ("OK", "WARNING", "CRITICAL", "UNKNOWN")

Case = TypeVar("Case")


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about a subject.

    Attributes:
        code: code of the rule or the check, such as ``HM101`` or ``gpu-ecc``. A code never changes its meaning.
        severity: see ``SEVERITIES``.
        subject: the affected part: "GPU 3 (0000:c6:00.0)", "NCCL_IB_HCA", "TaskPlugin=task/none"; empty for the whole.
        message: the observation, with its numbers, and the rule that it meets or breaks.
        fix: the remedy; empty if all is well.
        file: name of the file that it is in, as the user gave it; None if it is in no file.
        line: line of that file, counted from 1.
    """

    code: str
    severity: Severity
    subject: str
    message: str
    fix: str = ""
    file: str | None = None
    line: int | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON form: every field, null if it does not apply."""
        return {key: None if value == "" else value for key, value in asdict(self).items()}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> "Finding":
        """Return the finding that ``document`` was made from."""
        text = {key: document[key] or "" for key in ("subject", "message", "fix")}
        return cls(document["code"], document["severity"], file=document["file"], line=document["line"], **text)


class Hit(NamedTuple):
    """A place where a rule applies."""

    line: int = 0  # line number, counted from 1; 0 if there are no lines
    # item, advice: the words that fill ``{it}`` and ``{advice}`` in the rule's texts
    item: str = ""
    advice: str = ""
    file: str | None = None  # the file, if it is not the one under check
    subject: str = ""  # of the finding


@dataclass(frozen=True, slots=True)
class Rule(Generic[Case]):
    """One row of a linter's table."""

    code: str  # stable code; see ``Finding``
    severity: Severity
    # function that yields the places where the case (a script, a template, a cluster's settings) breaks the rule
    find: Callable[[Case], Iterable[Hit]]
    message: str  # the problem and its consequence
    fix: str

    def apply(self, case: Case, file: str | None = None) -> list[Finding]:
        """Return the findings of this rule. ``file``: file of the hits that name none."""
        return [self.finding(hit, file) for hit in self.find(case)]

    def finding(self, hit: Hit, file: str | None = None) -> Finding:
        """Return the finding of this rule for one hit."""
        return Finding(self.code, self.severity, hit.subject, filled(self.message, hit), filled(self.fix, hit),
                       hit.file or file, hit.line or None)


def filled(text: str, hit: Hit) -> str:
    """Return a rule's text with the words of a hit. A text that begins with the advice is capitalized."""
    advice = hit.advice[:1].upper() + hit.advice[1:] if text.startswith("{advice}") else hit.advice
    return re.sub(r"\{(it|advice)\}", lambda field: advice if field[1] == "advice" else hit.item, text)


def weight(finding: Finding) -> int:
    """Return the rank of a finding's severity: the smaller, the graver."""
    return SEVERITIES.index(finding.severity)


def worst(findings: Iterable[Finding]) -> Severity:
    """Return the gravest severity. An error outweighs a warning; a warning outweighs a check that could not look."""
    return min((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")


def findings_document(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the JSON document of a command that finds something: ``worst`` severity, its ``nagios`` code, and ``findings``."""
    grave = worst(findings)
    return {"worst": grave, "nagios": NAGIOS[grave], "findings": [finding.document() for finding in findings]}


def summary(findings: Iterable[Finding]) -> str:
    """Return the count of each severity in words: "1 error, 2 warnings"; empty without findings."""
    counts = Counter(finding.severity for finding in findings)
    plural = {"error", "warning"}
    return ", ".join(f"{counts[severity]} {severity}{'s' * (severity in plural and counts[severity] != 1)}"
                     for severity in SEVERITIES if counts[severity])


def nagios_line(findings: Sequence[Finding]) -> str:
    """Return one line in a monitor's format: the state, the counts, the gravest finding, and the counts as performance data."""
    gravest = min(findings, key=weight, default=None)
    state = NAGIOS_NAMES[NAGIOS[worst(findings)]]
    text = summary(findings) or "nothing was checked"
    if gravest is not None and gravest.severity not in ("ok", "info"):
        text += f"; {gravest.code}{f' {gravest.subject}' if gravest.subject else ''}: {gravest.message}"
    counts = Counter(finding.severity for finding in findings)
    figures = " ".join(f"{severity}={counts[severity]}" for severity in SEVERITIES)
    return f"HPC-MP {state} - {' '.join(text.replace('|', '/').split())} | {figures}"
