"""HM33x and HM34x: delivery of the warning signal before the end of a job to the ranks, and requeuing the job. Sources:
sbatch(1) on --signal, scontrol(1), and the behaviour of 22.05 for an ordinary user."""

import re
from collections.abc import Iterable

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.cluster.slurm.option_syntax import Option
from hpc_mp.lint.sbatch.programs import is_training
from hpc_mp.lint.sbatch.script import Script
from hpc_mp.lint.sbatch.shell import SHELLS, Command, inner_script

_SIGNAL = re.compile(r"(?:([RB]+):)?(?:SIG)?(\w+?)(?:@\d+)?", re.IGNORECASE)
NUMBERS = {"10": "USR1", "12": "USR2", "15": "TERM", "2": "INT", "1": "HUP"}

NOTE = re.compile(r"(?:export )?\w+=\w*")  # a trap that only sets a variable: its loss does no harm


def _signal_request(script: Script) -> tuple[Option, str, bool] | None:
    """Return (the directive, the name of the signal, True if it goes to the job's shell)."""
    option = script.option("signal")
    match = _SIGNAL.fullmatch(option.value or "") if option else None
    return (option, _name(match[2]), "B" in (match[1] or "").upper()) if option and match else None


def _name(signal: str) -> str:
    return NUMBERS.get(signal, signal.upper().removeprefix("SIG"))


def _traps(script: Script, signal: str, *, task: bool) -> list[Command]:
    return [trap for trap in script.commands("trap") if trap.task == task and signal in map(_name, trap.arguments[1:])]


def _reaches_nobody(script: Script) -> Iterable[Hit]:
    if (request := _signal_request(script)) and not request[2] and script.starts_here \
            and any(is_training(command.words) for command in script.shell.commands):
        yield Hit(request[0].line, request[1])


def _kills_the_shell(script: Script) -> Iterable[Hit]:
    if (request := _signal_request(script)) and request[2] and not _traps(script, request[1], task=False) \
            and not any("exec" in command.prefixes for command in script.shell.commands if not command.task):
        yield Hit(request[0].line, request[1])


def _trap_too_late(script: Script) -> Iterable[Hit]:
    if (request := _signal_request(script)) and request[2] and (traps := _traps(script, request[1], task=False)) \
            and not any(trap.arguments[0] == "" for trap in traps):
        for command in script.shell.commands:
            if (command.name == "srun" or is_training(command.words)) and not command.task and not command.background \
                    and not command.captured and command.line > traps[0].line:
                yield Hit(command.line, request[1])


def _trap_in_vain(script: Script) -> Iterable[Hit]:
    if (request := _signal_request(script)) and not request[2] and script.steps:
        yield from (Hit(trap.line, request[1]) for trap in _traps(script, request[1], task=False)
                    if trap.arguments[0] and not NOTE.fullmatch(trap.arguments[0]))


def _shell_in_between(script: Script) -> Iterable[Hit]:
    if not (request := _signal_request(script)) or request[2] or _traps(script, request[1], task=True):
        return
    for step in script.steps:
        inner = inner_script(step.program)
        if inner is None:
            continue
        lines = range(inner.line, inner.line + inner.text.count("\n") + 1)
        inside = [command for command in script.shell.commands
                  if command.task and command.line in lines and command.name not in SHELLS]
        work = [command for command in inside if is_training(command.words)]
        if work and len(inside) > 1 and "exec" not in work[-1].prefixes:
            yield Hit(work[-1].line, request[1])


REQUEUES = ("requeue", "requeuehold")


def _called(script: Script, *verbs: str, task: bool = False) -> list[Command]:
    return [command for command in script.commands("scontrol")
            if command.task == task and command.arguments and command.arguments[0] in verbs]


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
    "HM331": _reaches_nobody,
    "HM332": _kills_the_shell,
    "HM333": _trap_too_late,
    "HM334": _trap_in_vain,
    "HM335": _shell_in_between,
    "HM312": lambda script: (Hit(command.line) for command in _called(script, *REQUEUES, task=True)),
    "HM313": _held_for_ever,
    "HM341": _refused,
    "HM342": _excluded_too_early,
    "HM343": _never_released,
})
