"""The rules of the linter: tables, one per concept."""

from __future__ import annotations

from hpc_mp.cyclecloud.finding import Rule
from hpc_mp.cyclecloud.rules.form import RULES as FORM
from hpc_mp.cyclecloud.rules.images import RULES as IMAGES
from hpc_mp.cyclecloud.rules.nodes import RULES as NODES
from hpc_mp.cyclecloud.rules.parameters import RULES as PARAMETERS
from hpc_mp.cyclecloud.rules.project import RULES as PROJECT
from hpc_mp.cyclecloud.rules.sizes import RULES as SIZES
from hpc_mp.cyclecloud.rules.slurm import RULES as SLURM

RULES: tuple[Rule, ...] = (*FORM, *PARAMETERS, *NODES, *SLURM, *SIZES, *IMAGES, *PROJECT)
