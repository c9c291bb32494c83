"""HM33x and HM34x: delivery of the warning signal before the end of a job to the ranks, and requeuing the job. Sources:
sbatch(1) on --signal, scontrol(1), and the behaviour of 22.05 for an ordinary user."""

import itertools
import re
from collections.abc import Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.cluster.slurm.option_syntax import Option
from hpc_mp.lint.sbatch.programs import is_training
from hpc_mp.lint.sbatch.script import Script
from hpc_mp.lint.sbatch.shell import SHELLS, Command, inner_script

_SIGNAL = re.compile(r"(?:([RB]+):)?(?:SIG)?(\w+?)(?:@\d+)?", re.IGNORECASE)
NUMBERS = {"10": "USR1", "12": "USR2", "15": "TERM", "2": "INT", "1": "HUP"}

NOTE = re.compile(r"(?:export )?\w+=\w*")  # a trap that only sets a variable: its loss does no harm


def _signal_requests(script: Script) -> Iterator[tuple[Option, str, bool]]:
    """Yield (the directive, the name of the signal, True if it goes to the job's shell), if the job has the directive."""
    if (option := script.option("signal")) and (match := _SIGNAL.fullmatch(option.value or "")):
        yield option, _name(match[2]), "B" in (match[1] or "").upper()


def _name(signal: str) -> str:
    return NUMBERS.get(signal, signal.upper().removeprefix("SIG"))


def _traps(script: Script, signal: str, *, task: bool) -> list[Command]:
    return [trap for trap in script.commands("trap") if trap.task == task and signal in map(_name, trap.arguments[1:])]


def _trap_too_late(script: Script) -> Iterable[Hit]:
    for _, name, to_shell in _signal_requests(script):
        traps = _traps(script, name, task=False) if to_shell else []
        if traps and all(trap.arguments[0] for trap in traps):
            yield from (Hit(command.line, name) for command in script.shell.commands if command.line > traps[0].line
                        and (command.name == "srun" or is_training(command.words))
                        and not command.task and not command.background and not command.captured)


def _shell_in_between(script: Script) -> Iterable[Hit]:
    waiting = [name for _, name, to_shell in _signal_requests(script)
               if not to_shell and not _traps(script, name, task=True)]
    for name, inner in itertools.product(waiting, filter(None, (inner_script(step.program) for step in script.steps))):
        lines = range(inner.line, inner.line + inner.text.count("\n") + 1)
        inside = [command for command in script.shell.commands
                  if command.task and command.line in lines and command.name not in SHELLS]
        work = [command for command in inside if is_training(command.words)]
        if work and len(inside) > 1 and "exec" not in work[-1].prefixes:
            yield Hit(work[-1].line, name)


REQUEUES = ("requeue", "requeuehold")


def _called(script: Script, *verbs: str, task: bool = False) -> list[Command]:
    return [command for command in script.commands("scontrol")
            if command.task == task and command.arguments and command.arguments[0] in verbs]


def _excluded_too_early(script: Script) -> Iterable[Hit]:
    held = [command.line for command in _called(script, "requeuehold")]
    for command in _called(script, "update"):
        of_itself = any("SLURM_JOB" in argument for argument in command.arguments)
        excludes = any(argument.lower().startswith("excnodelist") for argument in command.arguments)
        if of_itself and excludes and not any(line <= command.line for line in held):
            yield Hit(command.line)


RULES: tuple[Rule[Script], ...] = rules_of("slurm/script-rules.toml", {
    "HM331": lambda script: (Hit(option.line, name) for option, name, to_shell in _signal_requests(script) if not to_shell
                            and script.starts_here and any(is_training(command.words) for command in script.shell.commands)),
    "HM332": lambda script: (Hit(option.line, name) for option, name, to_shell in _signal_requests(script) if to_shell
                            and not _traps(script, name, task=False)
                            and not any("exec" in command.prefixes for command in script.shell.commands if not command.task)),
    "HM333": _trap_too_late,
    "HM334": lambda script: (Hit(trap.line, name) for _, name, to_shell in _signal_requests(script) if not to_shell
                            and script.steps for trap in _traps(script, name, task=False)
                            if trap.arguments[0] and not NOTE.fullmatch(trap.arguments[0])),
    "HM335": _shell_in_between,
    "HM312": lambda script: (Hit(command.line) for command in _called(script, *REQUEUES, task=True)),
    "HM313": lambda script: () if any(
        not trap.task and trap.arguments[:1] == ("",) and {"TERM", "SIGTERM", "15"} & set(trap.arguments)
        for trap in script.commands("trap")) else (Hit(command.line) for command in _called(script, "requeuehold")),
    "HM341": lambda script: (Hit(command.line) for command in _called(script, *REQUEUES) if "no-requeue" in [
        option.name for option in script.options if option.name in ("requeue", "no-requeue")][-1:]),
    "HM342": _excluded_too_early,
    "HM343": lambda script: (Hit(command.line) for command in _called(script, "requeuehold")
                            if not any(release.line >= command.line for release in _called(script, "release"))),
})
