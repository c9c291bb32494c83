"""The rules of the linter, one table per concept, and their application to the text of a cluster template."""

from cyclecloud_lint.case import Case, read_case
from cyclecloud_lint.rules.machines import RULES as MACHINES
from cyclecloud_lint.rules.nodes import RULES as NODES
from cyclecloud_lint.rules.template import RULES as TEMPLATE
from cyclecloud_lint.template import ParameterFile, Project
from hpc_mp.base.findings import Finding, Hit, Rule

RULES: tuple[Rule[Case], ...] = (*TEMPLATE, *NODES, *MACHINES)
_LONGEST = 240


def lint(text: str, *, file: str = "template", parameters: ParameterFile | None = None,
         project: Project | None = None) -> tuple[Finding, ...]:
    """Return all findings of a template, its own first, in the order of lines. Nothing is run, and no service is queried.
    ``file``: name of the template in findings. ``project``: the project whose specs it uses; without it the project's files are
    not checked."""
    case = read_case(text, parameters, project)
    findings = {rule.finding(_printable(hit), file) for rule in RULES for hit in rule.find(case)}
    return tuple(sorted(findings, key=lambda finding: (finding.file != file, finding.file or "", finding.line or 0, finding.code,
                                                       finding.message)))


def _printable(hit: Hit) -> Hit:
    """Shorten quoted values to a readable length."""
    item, advice = (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…" for text in (hit.item, hit.advice))
    return hit._replace(item=item, advice=advice)
