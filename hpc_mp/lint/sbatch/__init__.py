"""Linter for job scripts, hpc-mp's and the user's: ``lint(text, directory=…)``."""

from hpc_mp.base.findings import Finding, Severity
from hpc_mp.lint.sbatch.rules import lint

__all__ = ["Finding", "Severity", "lint"]
