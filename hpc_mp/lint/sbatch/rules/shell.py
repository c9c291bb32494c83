"""HM5xx: the script as a shell script."""

import re
from collections.abc import Iterable

from hpc_mp.base.assets import asset_table
from hpc_mp.base.findings import Hit, Rule
from hpc_mp.lint.sbatch.programs import node_launcher
from hpc_mp.lint.sbatch.script import Script
from hpc_mp.lint.sbatch.shell import Command

SECRETS = "env/secrets.toml"
_OWN = r"(?:0|BASH_SOURCE)\b"
_OWN_FOLDER = re.compile(rf'\bdirname\s+(-- )?"?\$\{{?{_OWN}|\b(realpath|readlink)\b[^|;)]*\$\{{?{_OWN}'
                         rf'|\$\{{{_OWN}(\[0\])?%/\*\}}')

_NO_CONTINUATION = re.compile(r"[^#]*\s\\[ \t]+")
_IN_JOB = r'\s+"?[${]*SLURM_(?:SUBMIT_DIR|JOB_?ID)'
# A test and, behind it, the branch that no job reaches.
_NO_JOB = re.compile(
    rf"(\bif\b[^\n]*-(?:z{_IN_JOB}|[nv]{_IN_JOB}(?:(?!\bfi\b).)*?\belse\b))(?:(?!\b(?:elif|else|fi)\b).)*", re.DOTALL)


def _activations(script: Script) -> list[Command]:
    return [command for command in script.shell.commands
            if (command.name in ("conda", "mamba", "micromamba") and command.arguments[:1] == ("activate",))
            or (command.name in ("source", ".") and command.arguments and _conda_file(command.arguments[0]))]


def _conda_file(path: str) -> bool:
    return path.rpartition("/")[2] in ("conda.sh", "mamba.sh") or (path.endswith("/bin/activate") and "conda" in path)


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


def _conda_without_hook(script: Script) -> Iterable[Hit]:
    login = re.match(r"#!.*\s-\w*l", script.lines[0])
    hooked = any(command.name in ("source", ".", "module", "ml", "eval") for command in script.shell.commands)
    if not login and not hooked:
        yield from (Hit(call.line, call.name) for call in _activations(script) if call.name in ("conda", "mamba"))


def _unlimited_stack(script: Script) -> Iterable[Hit]:
    with_nccl = script.asks_for_gpus or any(node_launcher(command.words) for command in script.shell.commands)
    for command in script.commands("ulimit") if with_nccl else ():
        if "unlimited" in command.arguments and any(re.fullmatch(r"-[SH]*s", argument) for argument in command.arguments):
            yield Hit(command.line)


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


RULES: tuple[Rule[Script], ...] = (
    Rule("HM501", "warning", _nounset_and_conda,
         "conda's own scripts use unset variables: with set -u they end the job.",
         "Add set +u before it and set -u after it, or call the environment's python by its path."),
    Rule("HM502", "warning", _conda_without_hook, "{it} activate needs conda's shell hook, which a job script does not have.",
         "Add source …/etc/profile.d/conda.sh before it, or call the environment's python by its path."),
    Rule("HM503", "warning", _unlimited_stack,
         "ulimit -s unlimited shrinks the stacks of NCCL's threads to 2 MB before NCCL 2.28, which can crash ranks.",
         "ulimit -s 8192, or leave it out."),
    Rule("HM504", "error", _secret,
         "{it} contains a secret in plain text: Slurm stores the script, and shows it to operators and in job archives.",
         "Read the secret from a file that only you can read: NAME=$(< ~/.secret)."),
    Rule("HM505", "warning", _own_folder, "The folder of $0 is Slurm's spool directory: the job runs a copy of the script there.",
         "Use SLURM_SUBMIT_DIR or an absolute path."),
    Rule("HM506", "info", _modules_on_top, "Modules are loaded on top of the modules of the submitting shell.",
         "Add module purge before it."),
    Rule("HM507", "error", _background_in_step, "{it} runs in the background of a task that ends at once: Slurm kills it.",
         "Leave the & out, or add wait."),
    Rule("HM508", "warning", _blank_behind_backslash,
         "A blank follows the backslash: the command ends here, and the next line is a command of its own.",
         "Remove the blanks at the end of the line."),
)
