"""The rules of the linter, tables of which each has one concept; and from the text of a job script to what they find."""

from __future__ import annotations

from pathlib import Path

from hpc_mp.base.findings import Finding, Rule
from hpc_mp.lint.sbatch.rules.environment import RULES as ENVIRONMENT
from hpc_mp.lint.sbatch.rules.form import RULES as FORM
from hpc_mp.lint.sbatch.rules.launchers import RULES as LAUNCHERS
from hpc_mp.lint.sbatch.rules.rendezvous import RULES as RENDEZVOUS
from hpc_mp.lint.sbatch.rules.request import RULES as REQUEST
from hpc_mp.lint.sbatch.rules.requeue import RULES as REQUEUE
from hpc_mp.lint.sbatch.rules.shell import RULES as SHELL
from hpc_mp.lint.sbatch.rules.signals import RULES as SIGNALS
from hpc_mp.lint.sbatch.rules.steps import RULES as STEPS
from hpc_mp.lint.sbatch.script import Script, read_script

RULES: tuple[Rule[Script], ...] = (*FORM, *REQUEST, *STEPS, *LAUNCHERS, *SIGNALS, *REQUEUE, *RENDEZVOUS, *SHELL, *ENVIRONMENT)


def lint(text: str, *, directory: Path, file: str | None = None, version: tuple[int, int] | None = None) -> tuple[Finding, ...]:
    """Every finding, in the order of lines. Nothing of the script is run.

    Args:
        text: the script, with its own line ends.
        directory: where sbatch would be called: relative folders of ``--output`` are looked for there.
        file: its name, as findings show it.
        version: of Slurm, (23, 11) for 23.11; None when it is not known, then what some release refuses is a warning.
    """
    script = read_script(text, directory=directory, version=version)
    found = {finding for rule in RULES for finding in rule.apply(script, file)}
    return tuple(sorted(found, key=lambda finding: (finding.line or 0, finding.code, finding.message)))
