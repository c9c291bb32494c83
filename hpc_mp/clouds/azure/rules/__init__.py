"""The rules of the linter, tables of which each has one concept; and from the text of a cluster template to what they find."""

from __future__ import annotations

from hpc_mp.base.findings import Finding, Hit, Rule
from hpc_mp.clouds.azure.context import Case, read_case
from hpc_mp.clouds.azure.parameters import Given
from hpc_mp.clouds.azure.project import Project
from hpc_mp.clouds.azure.rules.machines import RULES as MACHINES
from hpc_mp.clouds.azure.rules.nodes import RULES as NODES
from hpc_mp.clouds.azure.rules.slurm import RULES as SLURM
from hpc_mp.clouds.azure.rules.template import RULES as TEMPLATE

RULES: tuple[Rule[Case], ...] = (*TEMPLATE, *NODES, *SLURM, *MACHINES)


_LONGEST = 240


def lint(text: str, *, file: str = "template", given: Given | None = None, project: Project | None = None) -> tuple[Finding, ...]:
    """Every finding, the template's own first, in the order of lines. Nothing is run, and nobody is asked.

    Args:
        text: the template.
        file: its name, as findings show it.
        given: values of its parameters; without them each has its default.
        project: the project whose specs it uses; without one its files are not looked at.
    """
    case = read_case(text, file=file, given=given, project=project)
    found = {rule.finding(_printable(hit), case.file) for rule in RULES for hit in rule.find(case)}
    return tuple(sorted(found, key=lambda each: (each.file != file, each.file or "", each.line or 0, each.code, each.message)))


def _printable(hit: Hit) -> Hit:
    """A value is quoted up to a length at which the line can still be read; a template's first line is 1."""
    return hit._replace(it=_short(hit.it), advice=_short(hit.advice), line=max(hit.line, 1))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
