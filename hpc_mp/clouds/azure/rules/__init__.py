"""The rules of the linter: tables, one per concept."""

from __future__ import annotations

from hpc_mp.base.findings import Rule
from hpc_mp.clouds.azure.context import Case
from hpc_mp.clouds.azure.rules.form import RULES as FORM
from hpc_mp.clouds.azure.rules.images import RULES as IMAGES
from hpc_mp.clouds.azure.rules.nodes import RULES as NODES
from hpc_mp.clouds.azure.rules.parameters import RULES as PARAMETERS
from hpc_mp.clouds.azure.rules.project import RULES as PROJECT
from hpc_mp.clouds.azure.rules.sizes import RULES as SIZES
from hpc_mp.clouds.azure.rules.slurm import RULES as SLURM

RULES: tuple[Rule[Case], ...] = (*FORM, *PARAMETERS, *NODES, *SLURM, *SIZES, *IMAGES, *PROJECT)
