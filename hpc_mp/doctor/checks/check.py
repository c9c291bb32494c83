"""The type of a check, and the runner of a set of checks: all at once, within one deadline even if a reader hangs."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from hpc_mp.base.findings import SEVERITIES, Finding, Severity
from hpc_mp.base.grouping import grouped
from hpc_mp.base.packed import node_table
from hpc_mp.cluster.node.deadline import in_time
from hpc_mp.cluster.node.source import NodeSource, Unavailable, keep

Facts = TypeVar("Facts")


class Judgement(NamedTuple):
    """A finding without its code, which its check adds. A fault without a remedy gets that of the check."""

    severity: Severity
    message: str
    subject: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Check(Generic[Facts]):
    """A check of one property of a machine."""

    code: str  # stable identifier: lower case words with hyphens
    reader: Callable[[NodeSource], Facts | None]  # raises Unavailable if it cannot; checks with the same reader share one reading
    judge: Callable[[Facts], Iterable[Judgement]]  # yields nothing if the machine has no such part
    reads: str = ""  # files and programs that are read, for people
    rule: str = ""  # conditions of a warning and an error, for people
    remedy: str = ""  # default remedy of a judgement that is not ok

    @property
    def severity(self) -> Severity:
        """The gravest severity that the rule names."""
        return next((severity for severity in SEVERITIES if severity in self.rule), "ok")

    def findings(self, facts: Facts | None) -> list[Finding]:
        """Return the findings; none for None, by which a reader says that the machine has no such part."""
        if facts is None:
            return []
        return [Finding(self.code, severity, subject, message, fix if severity == "ok" else fix or self.remedy)
                for severity, message, subject, fix in self.judge(facts)]


@functools.cache
def words() -> Mapping[str, Mapping[str, Any]]:
    """Return what ``env/node-checks.toml`` says of each check."""
    return node_table("node-checks")


def checks_of(reader: Callable[[NodeSource], Facts | None],
              judges: Mapping[str, Callable[[Facts], Iterable[Judgement]]]) -> tuple[Check[Any], ...]:
    """Return the checks of the facts that one function reads, in this order. Raises KeyError for a code without words."""
    return tuple(Check(code, reader, judge, words()[code]["reads"], words()[code]["rule"], words()[code].get("remedy", ""))
                 for code, judge in judges.items())


def or_well(bad: Iterable[Judgement], well: str) -> Iterator[Judgement]:
    """Yield the judgements, or one that is ok instead of none. ``well``: its text; empty if the machine has no such part."""
    faults = tuple(bad)
    yield from faults
    if well and not faults:
        yield Judgement("ok", well)


Said = dict[str, list[Finding]]  # by the code of the check
Answers = Callable[[Mapping[str, Callable[[], Said]], float, "Path | None"], Mapping[str, "Said | Unavailable"]]


def run(checks: Sequence[Check[Any]], source: NodeSource, deadline: float = 4.5, answers: Answers = in_time) -> list[Finding]:
    """Return the findings in the order of the checks. A check that cannot read, fails or times out is unknown.

    ``deadline``: seconds for all checks together. ``answers``: runner of the readings, by default in separate processes, so that
    none can hang the caller.
    """
    groups = grouped((check.reader, check) for check in checks)
    tasks = {group[0].code: functools.partial(_run_group, group, source) for group in groups.values()}
    findings: Said = {}
    for group, answer in zip(groups.values(), answers(tasks, deadline, keep(source, "hung.json")).values(), strict=True):
        findings |= {check.code: [_unknown(check, answer)] for check in group} if isinstance(answer, Unavailable) else answer
    return _one_for_a_cause([finding for check in checks for finding in findings[check.code]])


def _one_for_a_cause(findings: Sequence[Finding]) -> list[Finding]:
    """Drop redundant unknown findings: keep the first per cause, and none if another finding already states the cause."""
    texts = [" ".join(finding.message.split()) for finding in findings]
    reasons = {(finding.severity, text) for finding, text in zip(findings, texts, strict=True)
               if finding.severity in ("error", "unknown")}
    firsts: dict[tuple[str, ...], Finding] = {}
    others: dict[tuple[str, ...], list[str]] = {}
    for number, (finding, text) in enumerate(zip(findings, texts, strict=True)):
        blind = finding.severity == "unknown"
        cause = (finding.subject, text) if blind else (str(number),)
        if blind and any(text in reason and (severity == "error" or text != reason) for severity, reason in reasons):
            continue
        if firsts.setdefault(cause, finding) is not finding:
            others.setdefault(cause, []).append(finding.code)
    return [replace(finding, message=f"{finding.message} (so too {', '.join(others[cause])})") if cause in others else finding
            for cause, finding in firsts.items()]


def _run_group(group: Sequence[Check[Any]], source: NodeSource) -> Said:
    facts = group[0].reader(source)
    return {check.code: list(_judged(check, facts)) for check in group}


def _judged(check: Check[Any], facts: Any) -> Iterator[Finding]:
    try:
        yield from check.findings(facts)
    except Unavailable as reason:
        yield _unknown(check, reason)
    except Exception as error:  # unforeseen data costs one check, not all
        yield _unknown(check, Unavailable(f"{type(error).__name__}: {error}"))


def _unknown(check: Check[Any], why: Unavailable) -> Finding:
    return Finding(check.code, "unknown", "", " ".join(str(why).split()))
