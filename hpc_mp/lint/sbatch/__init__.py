"""Linter for job scripts, our own and anybody's: ``lint(text, directory=…)``."""

from __future__ import annotations

from hpc_mp.lint.sbatch.check import lint
from hpc_mp.lint.sbatch.finding import Finding, Severity

__all__ = ["Finding", "Severity", "lint"]
