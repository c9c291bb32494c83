"""The rules of the linter: tables, one per concept."""

from __future__ import annotations

from hpc_mp.base.findings import Rule
from hpc_mp.lint.sbatch.rules.environment import RULES as ENVIRONMENT
from hpc_mp.lint.sbatch.rules.form import RULES as FORM
from hpc_mp.lint.sbatch.rules.rendezvous import RULES as RENDEZVOUS
from hpc_mp.lint.sbatch.rules.request import RULES as REQUEST
from hpc_mp.lint.sbatch.rules.requeue import RULES as REQUEUE
from hpc_mp.lint.sbatch.rules.shell import RULES as SHELL
from hpc_mp.lint.sbatch.rules.signals import RULES as SIGNALS
from hpc_mp.lint.sbatch.rules.steps import RULES as STEPS
from hpc_mp.lint.sbatch.script import Script

RULES: tuple[Rule[Script], ...] = (*FORM, *REQUEST, *STEPS, *SIGNALS, *REQUEUE, *RENDEZVOUS, *SHELL, *ENVIRONMENT)
