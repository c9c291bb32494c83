"""From the text of a cluster template to what is wrong with it."""

from __future__ import annotations

from hpc_mp.clouds.azure.context import read_case
from hpc_mp.clouds.azure.finding import Finding
from hpc_mp.clouds.azure.parameters import Given
from hpc_mp.clouds.azure.project import Project
from hpc_mp.clouds.azure.rules import RULES


def lint(text: str, *, file: str = "template", given: Given | None = None, project: Project | None = None) -> tuple[Finding, ...]:
    """Every finding, the template's own first, in the order of lines. Nothing is run, and nobody is asked.

    Args:
        text: the template.
        file: its name, as findings show it.
        given: values of its parameters; without them each has its default.
        project: the project whose specs it uses; without one its files are not looked at.
    """
    case = read_case(text, file=file, given=given, project=project)
    found = {finding for rule in RULES for finding in rule.findings(case)}
    return tuple(sorted(found, key=lambda each: (each.file != file, each.file, each.line, each.code, each.message)))
