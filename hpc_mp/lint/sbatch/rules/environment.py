"""HM6xx: variables of NCCL, PyTorch and CUDA in a script. Most rules come from ``hpc_mp.environment``."""

import re
from collections.abc import Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.environment.rules import LOOPBACK, Settings
from hpc_mp.environment.rules import RULES as OF_VARIABLES
from hpc_mp.lint.sbatch.script import Script
from hpc_mp.lint.sbatch.shell import ShellAssignment

FOR_PROGRAMS = re.compile(r"(NCCL|TORCH_NCCL|UCX|GLOO|FI|OMP|HF)_[A-Z0-9_]+|MASTER_(ADDR|PORT)|WORLD_SIZE|PYTHONPATH")
_ONE_GPU = re.compile(r"\d+|\$\{?(SLURM_LOCALID|LOCAL_RANK|OMPI_COMM_WORLD_LOCAL_RANK)\}?")


def _exported(script: Script) -> Iterator[ShellAssignment]:
    names = script.shell.exported | {variable.name for variable in script.shell.assignments if variable.exported}
    everything = script.shell_option("a", "allexport") is not None
    return (variable for variable in script.shell.assignments if everything or variable.name in names)


def _in_script(rule: Rule[Settings], nodes: int = 0) -> Rule[Script]:
    """Apply a rule about variables to the exports of a script for ``nodes`` or more."""
    def find(script: Script) -> Iterable[Hit]:
        return rule.find(tuple(_exported(script))) if script.nodes >= nodes else ()

    return Rule(rule.code, rule.severity, find, rule.message, rule.fix)


RULES: tuple[Rule[Script], ...] = (
    *map(_in_script, OF_VARIABLES),
    _in_script(LOOPBACK, nodes=2),
    *rules_of("slurm/script-rules.toml", {
        "HM609": lambda script: (Hit(variable.line, variable.value) for variable in _exported(script)
                                 if variable.name == "CUDA_VISIBLE_DEVICES" and variable.task
                                 and _ONE_GPU.fullmatch(variable.value)),
        "HM610": lambda script: (Hit(variable.line) for variable in _exported(script)
                                 if variable.name == "CUDA_VISIBLE_DEVICES" and not variable.task and script.steps),
        "HM612": lambda script: (Hit(variable.line, variable.name) for variable in script.shell.assignments
                                 if FOR_PROGRAMS.fullmatch(variable.name) and not variable.captured
                                 and variable.name not in {exported.name for exported in _exported(script)}
                                 and not re.search(rf"\$\{{?{variable.name}\b", script.text)),
        "HM613": lambda script: (Hit(variable.line, variable.name) for variable in _exported(script)
                                 if variable.name.startswith("SBATCH_") and not any(script.commands("sbatch"))),
    }),
)
