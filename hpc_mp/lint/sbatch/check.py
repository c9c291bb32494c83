"""From the text of a job script to what is wrong with it."""

from __future__ import annotations

from pathlib import Path

from hpc_mp.base.findings import Finding
from hpc_mp.lint.sbatch.rules import RULES
from hpc_mp.lint.sbatch.script import read_script


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
