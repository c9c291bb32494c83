"""Azure CycleCloud: a parser of cluster templates, a catalogue of Azure's sizes, and an offline linter."""

from __future__ import annotations

from hpc_mp.base.findings import Finding, Severity
from hpc_mp.clouds.azure.parameters import read_given
from hpc_mp.clouds.azure.project import read_project
from hpc_mp.clouds.azure.rules import lint

__all__ = ["Finding", "Severity", "lint", "read_given", "read_project"]
