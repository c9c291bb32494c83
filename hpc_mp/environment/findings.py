"""Findings on the variables of a machine: general rules, and rules that need the machine."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hpc_mp.base.findings import Finding
from hpc_mp.environment.conf import read_lines
from hpc_mp.environment.machine_rules import RULES as ON_MACHINE
from hpc_mp.environment.machine_rules import Here
from hpc_mp.environment.precedence import Effective
from hpc_mp.environment.rules import LOOPBACK, RULES, Setting

# On a machine the number of nodes of a job is unknown, so the loopback may be right.
ANYWHERE = (*RULES, replace(LOOPBACK, severity="warning"))

_SETS = re.compile(r"\s*(?:(?:export|declare -x|setenv)\s+)?([A-Za-z_]\w*)(?:=|\s+(?=\S))(.*)")


def lint(host: Here) -> tuple[Finding, ...]:
    """Return every finding, sorted by variable, which is its subject. HM601 to HM618 are the same as in ``hpc-mp lint``."""
    context = [variable for variable in host.variables.values() if variable.origin != "default"]
    general = _general([Setting(variable.name, variable.value or "", number) for number, variable in enumerate(context)])
    findings = [_at(context[line], finding) for line, finding in general if context[line].origin != "profile"]
    fitting = (finding for rule in ON_MACHINE for finding in rule.apply(host))
    findings += [_at(host.variables.get(finding.subject), finding) for finding in fitting]
    return tuple(sorted(dict.fromkeys(findings),
                        key=lambda finding: (finding.subject, finding.code, finding.file or "", finding.line or 0)))


def place(variable: Effective) -> str:
    """Return a description of the source of a variable's value."""
    return f"profile {variable.where}" if variable.origin == "profile" else variable.where or variable.origin


def _general(settings: Sequence[Setting], path: str | None = None) -> Iterator[tuple[int, Finding]]:
    """Yield the findings of the general rules, each with the line of its setting, whose variable is its subject."""
    names = {setting.line: setting.name for setting in settings}
    for rule in ANYWHERE:
        yield from ((hit.line, rule.finding(hit._replace(subject=names[hit.line]), path)) for hit in rule.find(settings))


def _at(variable: Effective | None, finding: Finding) -> Finding:
    """Return the finding with the file and line that set the variable, if a file did."""
    if variable is None or variable.origin not in ("user file", "system file"):
        return replace(finding, file=None, line=None)
    path, _, line = variable.where.rpartition(":")
    return replace(finding, file=path, line=int(line))


def lint_variables(text: str, path: str) -> tuple[Finding, ...]:
    """Apply the general rules to the output of ``env``, to NAME=VALUE lines or to the exports of a shell."""
    settings = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := _SETS.match(line):
            settings.append(Setting(match[1], _unquoted(match[2]), number))
    return _by_line(finding for _, finding in _general(settings, path))


def lint_nccl_conf(data: bytes, path: str) -> tuple[Finding, ...]:
    """Apply the general rules to one of NCCL's files."""
    settings = [Setting(line.name, line.value, line.number) for line in read_lines(data)]
    return _by_line(finding for _, finding in _general(settings, path))


def _by_line(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: (finding.line or 0, finding.code)))


def _unquoted(value: str) -> str:
    """Return a value as a shell reads it. Text that a shell cannot parse is unchanged."""
    try:
        return " ".join(shlex.split(value, comments=True))
    except ValueError:
        return value
