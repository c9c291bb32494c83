"""The rules of the linter, one table per concept, and their application to the text of a cluster template."""

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
    """Return all findings, the template's own first, in the order of lines. Nothing is run, and no service is queried.

    Args:
        text: the template.
        file: name of the template in findings.
        given: values of its parameters; default: their defaults.
        project: the project whose specs it uses; without it the project's files are not checked.
    """
    case = read_case(text, file=file, given=given, project=project)
    found = {rule.finding(_printable(hit), case.file) for rule in RULES for hit in rule.find(case)}
    return tuple(sorted(found, key=lambda each: (each.file != file, each.file or "", each.line or 0, each.code, each.message)))


def _printable(hit: Hit) -> Hit:
    """Shorten quoted values to a readable length; a template's first line is 1."""
    return hit._replace(item=_short(hit.item), advice=_short(hit.advice), line=max(hit.line, 1))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
