"""HM34x: requeuing the job. Sources: scontrol(1), and the behaviour of 22.05 for an ordinary user."""

from collections.abc import Iterable

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.lint.sbatch.script import Script
from hpc_mp.lint.sbatch.shell import Command

REQUEUES = ("requeue", "requeuehold")


def _called(script: Script, *verbs: str, task: bool = False) -> list[Command]:
    return [command for command in script.commands("scontrol")
            if command.task == task and command.arguments and command.arguments[0] in verbs]


def _by_a_rank(script: Script) -> Iterable[Hit]:
    yield from (Hit(command.line) for command in _called(script, *REQUEUES, task=True))


def _held_for_ever(script: Script) -> Iterable[Hit]:
    ignored = any(not trap.task and trap.arguments[:1] == ("",) and {"TERM", "SIGTERM", "15"} & set(trap.arguments)
                  for trap in script.commands("trap"))
    if not ignored:
        yield from (Hit(command.line) for command in _called(script, "requeuehold"))


def _refused(script: Script) -> Iterable[Hit]:
    names = [option.name for option in script.options if option.name in ("requeue", "no-requeue")]
    if names[-1:] == ["no-requeue"]:
        yield from (Hit(command.line) for command in _called(script, *REQUEUES))


def _excluded_too_early(script: Script) -> Iterable[Hit]:
    held = [command.line for command in _called(script, "requeuehold")]
    for command in _called(script, "update"):
        of_itself = any("SLURM_JOB" in argument for argument in command.arguments)
        excludes = any(argument.lower().startswith("excnodelist") for argument in command.arguments)
        if of_itself and excludes and not any(line <= command.line for line in held):
            yield Hit(command.line)


def _never_released(script: Script) -> Iterable[Hit]:
    last = max((command.line for command in _called(script, "release")), default=0)
    yield from (Hit(command.line) for command in _called(script, "requeuehold") if command.line > last)


RULES: tuple[Rule[Script], ...] = rules_of("slurm/script-rules.toml", {
    "HM312": _by_a_rank,
    "HM313": _held_for_ever,
    "HM341": _refused,
    "HM342": _excluded_too_early,
    "HM343": _never_released,
})
