"""Findings of files: a template with its parameters and its project, or a project with all of its templates.

``hpc-mp`` looks both functions up by the entry points ``hpc_mp.linters``.
"""

from collections.abc import Sequence
from pathlib import Path

from cyclecloud_lint.rules import lint
from cyclecloud_lint.template import read_parameters, read_project
from hpc_mp.base.files import text_of
from hpc_mp.base.findings import Finding


def lint_template(template: Path, params: Path | None = None, project: Path | None = None) -> tuple[Finding, ...]:
    """Return the findings of a template. ``params``: file of its parameters' values; ``project``: directory of the project whose
    specs it uses. Raises HpcMpError if one of them cannot be read."""
    return lint(text_of(template, "cluster template"), file=str(template),
                parameters=read_parameters(params) if params else None, project=read_project(project) if project else None)


def lint_project(ini: Path) -> Sequence[Finding]:
    """Return the findings of every template beside a ``project.ini``, checked together with the project. Raises HpcMpError as
    ``lint_template``."""
    project, templates = read_project(ini.parent), sorted(ini.parent.glob("templates/*.txt"))
    if not templates:
        return [Finding("CC700", "info", "", "The project has no template in templates/: its specs are not checked.",
                        "Name the template: hpc-mp cloud lint TEMPLATE --project DIR.", str(ini))]
    return list(dict.fromkeys(finding for template in templates for finding in lint(
        text_of(template, "cluster template"), file=str(template), project=project)))
