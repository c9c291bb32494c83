"""Azure CycleCloud: a parser of cluster templates, a catalogue of Azure's sizes, and an offline linter."""

from __future__ import annotations

from hpc_mp.base.findings import Finding
from hpc_mp.clouds.azure.files import read_parameters, read_project
from hpc_mp.clouds.azure.rules import lint

__all__ = ["Finding", "lint", "read_parameters", "read_project"]
