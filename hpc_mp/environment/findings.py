"""What is wrong with the variables of a machine: rules that hold anywhere, those that need the machine, and NCCL's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hpc_mp.base.findings import Finding
from hpc_mp.environment import file_rules, machine_rules
from hpc_mp.environment.conf import ConfFile
from hpc_mp.environment.file_rules import ReadFile
from hpc_mp.environment.machine_rules import Here
from hpc_mp.environment.precedence import Effective
from hpc_mp.environment.rules import LOOPBACK, RULES

# A machine does not say how many nodes a job will have: there the loopback may be right.
ANYWHERE = (*RULES, replace(LOOPBACK, severity="warning"))


class _Numbered(NamedTuple):
    name: str
    value: str
    line: int


def lint(here: Here, files: Iterable[ConfFile], environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Every finding, by variable, which is its subject; HM601 to HM618 mean the same to ``hpc-mp lint``.

    Args:
        files: NCCL's, in which lines are looked at too.
        environ: of the process.
    """
    found = [*_anywhere(tuple(here.variables.values())), *_on_machine(here)]
    for file in files:
        found += [finding for rule in file_rules.RULES for finding in rule.apply(ReadFile(file, environ), file.path)]
    return tuple(sorted(dict.fromkeys(found), key=lambda each: (each.subject, each.code, each.file or "", each.line or 0)))


def place(variable: Effective) -> str:
    """Who says the value of a variable, in words."""
    return f"profile {variable.where}" if variable.origin == "profile" else variable.where or variable.origin


def _anywhere(variables: Sequence[Effective]) -> Iterator[Finding]:
    """A profile knows what it says, so its own values are not held against it."""
    said = [each for each in variables if each.origin not in ("default", "profile")]
    context = [each for each in variables if each.origin != "default"]
    settings = [_Numbered(each.name, each.value or "", number) for number, each in enumerate(context)]
    for rule in ANYWHERE:
        for hit in rule.find(settings):
            each = context[hit.line]
            if each in said:
                yield _at(each, rule.finding(hit._replace(subject=each.name)))


def _on_machine(here: Here) -> Iterator[Finding]:
    for rule in machine_rules.RULES:
        for finding in rule.apply(here):
            yield _at(here.variables.get(finding.subject), finding)


def _at(variable: Effective | None, finding: Finding) -> Finding:
    """In the file and line that set the variable, if a file did."""
    if variable is None or variable.origin not in ("user file", "system file"):
        return replace(finding, file=None, line=None)
    path, _, line = variable.where.rpartition(":")
    return replace(finding, file=path, line=int(line))
