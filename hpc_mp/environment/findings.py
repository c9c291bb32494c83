"""What is wrong with the variables of a machine: rules that hold anywhere, those that need the machine, and NCCL's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpc_mp.environment import machine_rules
from hpc_mp.environment.conf import ConfFile
from hpc_mp.environment.file_rules import faults
from hpc_mp.environment.machine_rules import Here
from hpc_mp.environment.precedence import Effective
from hpc_mp.environment.rule import Hit, Severity, filled
from hpc_mp.environment.rules import LOOPBACK, RULES

# A machine does not say how many nodes a job will have: there the loopback may be right.
ANYWHERE = (*RULES, replace(LOOPBACK, severity="warning"))


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    Attributes:
        code: ``HM`` and three digits; those from 601 to 618 mean the same to ``hpc-mp lint``.
        severity: ``error`` is wrong on any cluster, ``warning`` depends on the site or the case, ``info`` is style.
        name: of the variable; empty where it is about none.
        where: who says so: ``process``, ``/etc/nccl.conf:3``, ``profile azure-ndv4``; empty where nobody does.
        message, fix: what stands there and why it hurts; what to do about it.
    """

    code: str
    severity: Severity
    name: str
    where: str
    message: str
    fix: str


class _Numbered(NamedTuple):
    name: str
    value: str
    line: int


def lint(variables: Sequence[Effective], here: Here, files: Iterable[ConfFile],
         environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Every finding, by variable.

    Args:
        variables: as they count here.
        files: NCCL's, in which lines are looked at too.
        environ: of the process.
    """
    found = [*_anywhere(variables), *_on_machine(variables, here), *_in_files(files, environ)]
    return tuple(sorted(dict.fromkeys(found), key=lambda each: (each.name, each.code, each.where)))


def place(variable: Effective) -> str:
    """Who says the value of a variable, in words."""
    return f"profile {variable.where}" if variable.origin == "profile" else variable.where or variable.origin


def _anywhere(variables: Sequence[Effective]) -> Iterator[Finding]:
    """A profile knows what it says, so its own values are not held against it."""
    said = [each for each in variables if each.origin not in ("default", "profile")]
    context = [each for each in variables if each.origin != "default"]
    settings = [_Numbered(each.name, each.value or "", line) for line, each in enumerate(context)]
    for rule in ANYWHERE:
        for hit in rule.find(settings):
            each = context[hit.line]
            if each in said:
                yield Finding(rule.code, rule.severity, each.name, place(each), filled(rule.message, hit), filled(rule.fix, hit))


def _on_machine(variables: Sequence[Effective], here: Here) -> Iterator[Finding]:
    named = {each.name: each for each in variables}
    for rule in machine_rules.RULES:
        for at in rule.find(named, here):
            hit = Hit(0, at.it, at.advice)
            each = named.get(at.name)
            where = place(each) if each and each.origin != "default" else ""
            yield Finding(rule.code, rule.severity, at.name, where, filled(rule.message, hit), filled(rule.fix, hit))


def _in_files(files: Iterable[ConfFile], environ: Mapping[str, str]) -> Iterator[Finding]:
    for file in files:
        for fault in faults(file, environ):
            yield Finding(fault.code, fault.severity, fault.name, f"{file.path}:{fault.line}", fault.message, fault.fix)
