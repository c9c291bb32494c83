"""The script's variables that hold one known text, and the working directory of its shell at each statement."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.adopt.blanks import BLANK
from hpc_mp.adopt.expand import FixedValues, fields
from hpc_mp.adopt.launches import function_name
from hpc_mp.lint.sbatch.shell import read_shell
from hpc_mp.lint.sbatch.statements import CallSite, Source, Statement, read_statements

# Files that prepare a shell and do not touch a script's own variables.
HARMLESS = re.compile(r"activate$|conda\.sh$|\.bashrc$|\.bash_profile$|\.profile$|/etc/profile(\.d/.*)?$|/init/\w+$|setvars\.sh$")
MOVERS = frozenset({"cd", "pushd", "popd"})
_SET_BY_WORD = re.compile(r"\b(?:for|select|(?:read|mapfile|readarray)(?:\s+-\w+)*|unset|getopts\s+\S+|printf\s+-v|let)\s+"
                          r"([A-Za-z_]\w*(?:\s+[A-Za-z_]\w*)*)")
SETS = re.compile(r"\$\{([A-Za-z_]\w*):?=")  # ``: "${NAME:=value}"`` sets a variable that is unset or empty


@dataclass(frozen=True, slots=True)
class KnownShell:
    """The known state of the shell before each statement.

    Attributes:
        fixed: the fixed variables, by the number of the statement, and one more entry for the end of the script.
        directories: the working directory before each statement and at the end; None if unknown.
        names: every variable that the script sets.
        movers: the commands that change the directory of the shell, the script's own functions included.
    """

    fixed: tuple[FixedValues, ...]
    directories: tuple[str | None, ...]
    names: frozenset[str]
    movers: frozenset[str] = MOVERS


def what_is_known(source: Source, directory: str, exported: Mapping[str, str]) -> KnownShell:
    """Follow the statements of a script and record the known state before each.

    Args:
        directory: the initial working directory of its shell.
        exported: the variables that ``--export`` sets.
    """
    shell = read_shell(source.text)
    counts = Counter(each.name for each in shell.assignments)
    for found in _SET_BY_WORD.finditer(source.text):
        counts.update(found[1].split() * 2)  # never one known text
    counts.update(name for name in SETS.findall(source.text) for _ in range(2))
    submitted = {"SLURM_SUBMIT_DIR": (directory,)}
    texts: dict[str, tuple[str, ...]] = {**submitted, **{name: (value,) for name, value in exported.items() if not counts[name]}}
    arrays: set[str] = set()
    here: str | None = directory
    leading = MOVERS
    for statement in source.statements:  # a function can call functions defined above it
        if (name := function_name(statement)) and any(call.command.name in leading for call in statement.calls):
            leading |= {name}
    fixed, directories = [], []
    for statement in source.statements:
        fixed.append(FixedValues(dict(texts), frozenset(arrays), here))
        directories.append(here)
        if files := sourced(statement, fixed[-1]):
            texts = {**submitted}  # the files may set any variable
        for each, raw in statement.assignments:
            if counts[each.name] == 1 and not each.appended:
                _assign(each.name, raw, each.array, texts, arrays, here)
        here = None if any(map(moves, files)) else _moved(
            movers(statement, leading), statement, here, FixedValues(texts, frozenset(arrays), here))
    fixed.append(FixedValues(dict(texts), frozenset(arrays), here))
    directories.append(here)
    return KnownShell(tuple(fixed), tuple(directories), frozenset(name.partition("[")[0] for name in counts),
                      leading)


def _assign(name: str, raw: str, array: bool, texts: dict[str, tuple[str, ...]], arrays: set[str], here: str | None) -> None:
    fixed = FixedValues(texts, frozenset(arrays), here)
    if array:
        inner = raw.strip()[1:-1]
        if "#" in inner:
            return
        words = [fields(word, fixed) for word in _words(inner)]
        if all(word is not None for word in words):
            texts[name] = tuple(part for word in words for part in word or ())
            arrays.add(name)
    elif (value := fields(raw, fixed, value=True)) is not None:
        texts[name] = value


def _words(text: str) -> Sequence[str]:
    """Return the words of an array as written."""
    return re.findall(r"(?:\\.|\$\([^()]*\)|\"(?:\\.|[^\"\\])*\"|'[^']*'|[^\s\"'\\])+", text.replace("\\\n", " "))


def sourced(statement: Statement, fixed: FixedValues) -> list[str]:
    """Return the files that the shell sources, as written if their names are not known. For ``eval`` the name is empty."""
    found = []
    for call in statement.calls:
        if call.command.name in ("source", ".", "eval") and "command_substitution" not in call.inside:
            named = call.arguments[-1].source
            words = fields(named, fixed)
            name = words[-1] if words else named.strip("\"'")
            if not HARMLESS.search(name) and "conda" not in name:
                there = os.path.join(fixed.directory or "", name) if words else name
                found.append("" if call.command.name == "eval" else there)
    return found


def moves(file: str) -> bool | None:
    """Return True if sourcing a file may change the directory of the shell; None if the file cannot be read here."""
    try:
        read = read_statements(Path(file).read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return None
    return any(sourced(each, FixedValues()) or any(
        call.command.name in MOVERS and not {"command_substitution", "subshell"} & set(call.inside) for call in each.calls)
        for each in read.statements)


def movers(statement: Statement, leading: frozenset[str]) -> list[CallSite]:
    """Return the commands of a statement that change the directory of the script's own shell."""
    return [call for call in statement.calls if (call.command.name in leading or (
        call.command.name == "eval" and re.search(r"\b(cd|pushd)\b", statement.text)))
            and not {"command_substitution", "subshell", "function_definition"} & set(call.inside)]


def _moved(found: Sequence[CallSite], statement: Statement, here: str | None, fixed: FixedValues) -> str | None:
    """Return the directory of the shell after a statement. A directory that does not exist here counts as unknown."""
    if not found:
        return here
    if BLANK in statement.text:  # a placeholder: the line is not carried over
        return here
    call = found[0]
    if here is None or len(found) > 1 or call.command.name != "cd" or set(call.inside) - {"list", "redirected_statement"} \
            or len(call.arguments) != 2 or (call.inside and call.start != statement.start):
        return None
    words = fields(call.arguments[1].source, fixed)
    if words is None or len(words) != 1:
        return None
    there = os.path.normpath(Path(here) / words[0])
    return there if os.path.isdir(there) else None
