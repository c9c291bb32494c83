"""Classification of single statements of the user's script: printing, preparing an environment, writing files and so on."""

from __future__ import annotations

import re
from typing import Literal

from hpc_mp.adopt.known import SETS
from hpc_mp.lint.sbatch.statements import CallSite, Statement

Kind = Literal["print", "assign", "shell", "directory", "environment", "trap", "resubmit", "unreadable", "together", "code"]
PRINTS = frozenset({
    "echo", "printf", "date", "hostname", "pwd", "whoami", "env", "printenv", "nvidia-smi", "which", "lscpu", "free", "uname",
    "squeue", "sinfo", "ls", "df", "id", "true", ":", "clear", "rocm-smi", "tree", "uptime", "nproc", "type", "sacct", "sstat",
    "seff", "jobstats", "du", "ps", "lsb_release"})
FILTERS = frozenset({"grep", "egrep", "sort", "head", "tail", "uniq", "wc", "cut", "tr", "column", "cat", "bc", "["})
SHELL = frozenset({"set", "shopt"})
PREPARES = frozenset({"module", "ml", "conda", "mamba", "micromamba", "source", ".", "eval"})
_INITIAL = re.compile(r"modules?\.sh$|lmod\.sh$|/init/(ba)?sh$|/etc/profile$|/etc/bashrc$")
_HOOK = re.compile(r"conda.*(shell\.\w+|shell\s+hook)|\$\(conda info --base\)/etc/profile\.d/conda\.sh")
LISTS = frozenset({"list", "avail", "av", "spider", "show", "whatis", "overview"})
VERBS = LISTS | {"purge", "load", "add", "unload", "del", "rm", "swap", "switch", "use", "unuse", "restore", "reset", "save",
                 "refresh", "update", "try-load", "load-any", "is-loaded"}


def kind_of(statement: Statement) -> Kind:
    """Return the kind of a statement."""
    calls = [call for call in statement.calls if "command_substitution" not in call.inside]
    names = [call.command.name for call in calls]
    if statement.kind in ("variable_assignment", "variable_assignments", "declaration_command"):
        return "assign"
    if statement.command is not None and names[:1] == ["trap"]:
        return "trap"
    if any(name in ("sbatch", "scancel") for name in names) or re.search(r"\bscontrol\s+requeue", statement.text):
        return "resubmit" if statement.kind in ("command", "redirected_statement", "pipeline", "list") else "code"
    simple = statement.kind in ("command", "redirected_statement", "list") and len(set(names)) >= 1
    if set(names) == {":"} and statement.kind == "redirected_statement" and ">" not in statement.text.split("\n", 1)[0] \
            and not SETS.search(statement.text):
        return "print"  # a here-document used as a comment
    if simple and not writes(statement) and all(map(prints, names, calls)):
        return "print"
    if statement.command is None:
        return "code"
    name = names[0] if names else ""
    if name in SHELL:
        return "shell"
    if name == "cd":
        return "directory"
    if name in PREPARES and environment_part(statement) is not None:
        return "environment"
    return "code"


def prints(name: str, call: CallSite) -> bool:
    """Return True if a command only shows something."""
    return name in PRINTS or (name == "scontrol" and [word.text for word in call.command.words[1:2]] == ["show"])


def writes(statement: Statement) -> bool:
    """Return True if a statement reads or writes files, or sets a variable by ``${A:=…}``, ``printf -v A`` or ``$((A++))``."""
    plain = re.sub(r"\"(?:\\.|[^\"\\])*\"|'[^']*'", "x", statement.text)
    return bool(re.search(r"(?<![&>\d])>>?\s*(?!&|/dev/)|<", plain) or SETS.search(statement.text) or makes_files(statement)
                or _SETS_BESIDES.search(statement.text))


def makes_files(statement: Statement) -> bool:
    """Return True if a ``$(…)`` in the statement creates or removes files."""
    return any("command_substitution" in call.inside and call.command.name in _MAKERS for call in statement.calls)


_MAKERS = frozenset({"mkdir", "mktemp", "touch", "cp", "mv", "rm", "ln", "tee"})
_SETS_BESIDES = re.compile(r"\bprintf\s+-v|\$\(\([^()]*(?:\+\+|--|[^=!<>]=[^=])")


def environment_part(statement: Statement) -> str | None:
    """Return the part of a Python environment that a statement prepares: modules, conda's hook, conda, venv; None otherwise."""
    call = statement.calls[0] if statement.calls else None
    if call is None:
        return None
    name, arguments = call.command.name, [each.source for each in call.arguments[1:]]
    if name == "ml" or (name == "module" and arguments[:1] and arguments[0] in VERBS):
        return "modules"
    if name in ("conda", "mamba", "micromamba"):
        return "conda" if arguments[:1] == ["activate"] else None
    if name == "eval":
        return "hook" if _HOOK.search(statement.text) else None
    if _HOOK.search(statement.text):
        return "hook"
    if arguments and _INITIAL.search(arguments[0].strip("\"'")):
        return "initial"
    if arguments[:1] == ["activate"]:
        return "conda"
    return "venv" if len(arguments) == 1 and arguments[0].strip("\"'").endswith("/bin/activate") else None
