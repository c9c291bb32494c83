"""Findings on the variables of a machine: general rules, rules that need the machine, and rules on NCCL's files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hpc_mp.base.findings import Finding
from hpc_mp.environment import file_rules, machine_rules
from hpc_mp.environment.conf import ConfFile, read_lines
from hpc_mp.environment.file_rules import ReadFile
from hpc_mp.environment.machine_rules import Here
from hpc_mp.environment.precedence import Effective
from hpc_mp.environment.rules import LOOPBACK, RULES, Setting

# On a machine the number of nodes of a job is unknown, so the loopback may be right.
ANYWHERE = (*RULES, replace(LOOPBACK, severity="warning"))

_SETS = re.compile(r"\s*(?:(?:export|declare -x|setenv)\s+)?([A-Za-z_]\w*)(?:=|\s+(?=\S))(.*)")


def lint(host: Here, files: Iterable[ConfFile], environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return every finding, sorted by variable, which is its subject. HM601 to HM618 are the same as in ``hpc-mp lint``.

    Args:
        files: NCCL's files, whose lines are checked too.
        environ: the environment of the process.
    """
    findings = [*_anywhere(tuple(host.variables.values())), *_on_machine(host)]
    for file in files:
        findings += [finding for rule in file_rules.RULES for finding in rule.apply(ReadFile(file, environ), file.path)]
    return tuple(sorted(dict.fromkeys(findings),
                        key=lambda finding: (finding.subject, finding.code, finding.file or "", finding.line or 0)))


def place(variable: Effective) -> str:
    """Return a description of the source of a variable's value."""
    return f"profile {variable.where}" if variable.origin == "profile" else variable.where or variable.origin


def _anywhere(variables: Sequence[Effective]) -> Iterator[Finding]:
    """Yield the findings of general rules. Values from the profile itself are not reported."""
    explicit = [variable for variable in variables if variable.origin not in ("default", "profile")]
    context = [variable for variable in variables if variable.origin != "default"]
    settings = [Setting(variable.name, variable.value or "", number) for number, variable in enumerate(context)]
    for rule in ANYWHERE:
        for hit in rule.find(settings):
            variable = context[hit.line]
            if variable in explicit:
                yield _at(variable, rule.finding(hit._replace(subject=variable.name)))


def _on_machine(host: Here) -> Iterator[Finding]:
    for rule in machine_rules.RULES:
        for finding in rule.apply(host):
            yield _at(host.variables.get(finding.subject), finding)


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
    return _of_lines(settings, path)


def lint_nccl_conf(data: bytes, path: str) -> tuple[Finding, ...]:
    """Apply the general rules, and the rules on lines, to one of NCCL's files."""
    lines, silent = read_lines(data)
    findings = [finding for rule in file_rules.RULES for finding in rule.apply(ReadFile(ConfFile(path, lines, silent), {}), path)]
    return tuple(sorted((*findings, *_of_lines([Setting(line.name, line.value, line.number) for line in lines], path)),
                        key=lambda finding: (finding.line or 0, finding.code)))


def _of_lines(settings: Sequence[Setting], path: str) -> tuple[Finding, ...]:
    names = {setting.line: setting.name for setting in settings}
    findings = {rule.finding(hit._replace(subject=names[hit.line]), path) for rule in ANYWHERE for hit in rule.find(settings)}
    return tuple(sorted(findings, key=lambda finding: (finding.line or 0, finding.code)))


def _unquoted(value: str) -> str:
    """Return a value as a shell reads it. Text that a shell cannot parse is unchanged."""
    try:
        return " ".join(shlex.split(value, comments=True))
    except ValueError:
        return value
