"""HM5xx: the script as a shell script."""

import re
from collections.abc import Iterable

from hpc_mp.base.assets import asset_table
from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.lint.sbatch.programs import node_launcher
from hpc_mp.lint.sbatch.rules.finders import of_commands
from hpc_mp.lint.sbatch.script import Script
from hpc_mp.lint.sbatch.shell import Command

SECRETS = "env/secrets.toml"
_OWN = r"(?:0|BASH_SOURCE)\b"
_OWN_FOLDER = re.compile(rf'\bdirname\s+(-- )?"?\$\{{?{_OWN}|\b(realpath|readlink)\b[^|;)]*\$\{{?{_OWN}'
                         rf'|\$\{{{_OWN}(\[0\])?%/\*\}}')

_CONDA_FILE = re.compile(r"(?:.*/)?(?:conda|mamba)\.sh|(?=.*conda).*/bin/activate", re.DOTALL)
_LOGIN = re.compile(r"#!.*\s-\w*l")
_NO_CONTINUATION = re.compile(r"[^#]*\s\\[ \t]+")
_IN_JOB = r'\s+"?[${]*SLURM_(?:SUBMIT_DIR|JOB_?ID)'
# A test and, behind it, the branch that no job reaches.
_NO_JOB = re.compile(
    rf"(\bif\b[^\n]*-(?:z{_IN_JOB}|[nv]{_IN_JOB}(?:(?!\bfi\b).)*?\belse\b))(?:(?!\b(?:elif|else|fi)\b).)*", re.DOTALL)


def _activations(script: Script) -> list[Command]:
    return [command for command in script.shell.commands
            if (command.name in ("conda", "mamba", "micromamba") and command.arguments[:1] == ("activate",))
            or (command.name in ("source", ".") and _CONDA_FILE.fullmatch("".join(command.arguments[:1])))]


def _nounset_and_conda(script: Script) -> Iterable[Hit]:
    strict = script.shell_option("u", "nounset")
    if strict is None:
        return
    relaxed = [command.line for command in script.commands("set") if "+u" in command.arguments or
               command.arguments[:2] == ("+o", "nounset")]
    for command in _activations(script):
        if command.line > strict.line and not any(strict.line < line <= command.line for line in relaxed):
            yield Hit(command.line)
            return


def _secret(script: Script) -> Iterable[Hit]:
    table = asset_table(SECRETS)
    tokens, hit_lines = re.compile("|".join(table["tokens"])), set()
    for assignment in script.shell.assignments:
        literal = not assignment.expands and "$" not in assignment.raw and "`" not in assignment.raw
        if literal and re.search(table["names"], assignment.name) and re.fullmatch(table["value"], assignment.value):
            hit_lines.add(assignment.line)
            yield Hit(assignment.line, assignment.name)
    for command in script.shell.commands:
        for word, following in zip(command.words, (*command.words[1:], None), strict=True):
            name, equals, value = word.text.partition("=")
            value = value if equals else following.text if following else ""
            if name.startswith("-") and re.search(table["names"], name) and re.fullmatch(table["value"], value):
                hit_lines.add(word.line)
                yield Hit(word.line, name)
    for number, line in enumerate(script.lines, start=1):
        if number not in hit_lines and tokens.search(line):
            yield Hit(number, "This line")


def _own_folder(script: Script) -> Iterable[Hit]:
    if "scontrol show job" in script.text:
        return
    reached = _NO_JOB.sub(lambda test: test[1] + "\n" * test[0].count("\n", len(test[1])), "\n".join(script.lines))
    for number, line in enumerate(reached.split("\n"), start=1):
        if not line.lstrip().startswith("#") and _OWN_FOLDER.search(line):
            yield Hit(number)


def _modules_on_top(script: Script) -> Iterable[Hit]:
    commands = list(script.commands("module", "ml"))
    cleared = any({"purge", "reset", "restore"} & set(command.arguments) for command in commands)
    if commands and not cleared and (script.value("export") or "ALL").upper() != "NONE":
        yield Hit(commands[0].line)


def _background_in_step(script: Script) -> Iterable[Hit]:
    waits = any(command.task for command in script.commands("wait"))
    tasks = [command for command in script.shell.commands if command.task and command.name not in ("bash", "sh")]
    if tasks and tasks[-1].background and not waits:
        yield Hit(tasks[-1].line, tasks[-1].name)


def _blank_behind_backslash(script: Script) -> Iterable[Hit]:
    lines = {number for number, line in enumerate(script.lines, start=1) if _NO_CONTINUATION.fullmatch(line)}
    for last in (command.words[-1] for command in script.shell.commands):
        if last.line in lines and "\n" not in last.text:
            yield Hit(last.line)


RULES: tuple[Rule[Script], ...] = rules_of("slurm/script-rules.toml", {
    "HM501": _nounset_and_conda,
    "HM502": lambda script: (Hit(call.line, call.name) for call in _activations(script) if call.name in ("conda", "mamba")
                            and not _LOGIN.match(script.lines[0])
                            and not any(script.commands("source", ".", "module", "ml", "eval"))),
    "HM503": of_commands(lambda script, command: command.name == "ulimit" and "unlimited" in command.arguments
                         and any(re.fullmatch(r"-[SH]*s", argument) for argument in command.arguments)
                         and (script.asks_for_gpus or any(node_launcher(other.words) for other in script.shell.commands))),
    "HM504": _secret,
    "HM505": _own_folder,
    "HM506": _modules_on_top,
    "HM507": _background_in_step,
    "HM508": _blank_behind_backslash,
})
