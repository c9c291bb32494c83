"""The rules of the linter, one table per concept, and their application to the text of a job script."""

from pathlib import Path

from hpc_mp.base.findings import Finding, Rule
from hpc_mp.lint.sbatch.rules.environment import RULES as ENVIRONMENT
from hpc_mp.lint.sbatch.rules.form import RULES as FORM
from hpc_mp.lint.sbatch.rules.launchers import RULES as LAUNCHERS
from hpc_mp.lint.sbatch.rules.rendezvous import RULES as RENDEZVOUS
from hpc_mp.lint.sbatch.rules.request import RULES as REQUEST
from hpc_mp.lint.sbatch.rules.shell import RULES as SHELL
from hpc_mp.lint.sbatch.rules.signals import RULES as SIGNALS
from hpc_mp.lint.sbatch.rules.steps import RULES as STEPS
from hpc_mp.lint.sbatch.script import Script, read_script

RULES: tuple[Rule[Script], ...] = (*FORM, *REQUEST, *STEPS, *LAUNCHERS, *SIGNALS, *RENDEZVOUS, *SHELL, *ENVIRONMENT)

FOR_JOBS = frozenset({"HM201", "HM206", "HM311", "HM505", "HM506"})  # rules that only apply to a script that runs as a job


def lint(text: str, *, directory: Path, file: str | None = None, version: tuple[int, int] | None = None) -> tuple[Finding, ...]:
    """Return every finding, sorted by line. No part of the script is run.

    Args:
        text: the script, with its original line ends.
        directory: the directory in which sbatch would be called: relative folders of ``--output`` are looked up there.
        file: the file name that findings show.
        version: the release of Slurm, (23, 11) for 23.11. None if unknown: refusals by some releases are then warnings.
    """
    script = read_script(text, directory=directory, version=version)
    rules = [rule for rule in RULES if not (script.only_writes_jobs and rule.code in FOR_JOBS)]
    findings = {finding for rule in rules for finding in rule.apply(script, file)}
    return tuple(sorted(findings, key=lambda finding: (finding.line or 0, finding.code, finding.message)))
