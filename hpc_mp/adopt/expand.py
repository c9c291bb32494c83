"""Expansion of words as bash would do it, as far as the script's text allows. No word is ever passed to a shell.

A word of the command is of one of three kinds. A *literal* word needs no expansion. A *rank* word can be expanded by a rank,
because its variables are the same in every task. A *batch* word needs the batch shell, which has the script's variables.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hpc_mp.base.programs import IDENTITY

# Variables that are the same in the job's shell and in every task, or that hpc-mp sets for each rank under the same name.
SAME_EVERYWHERE = frozenset({
    *IDENTITY, "NNODES", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NAME", "SLURM_JOB_NUM_NODES", "SLURM_NNODES",
    "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT", "SLURM_CLUSTER_NAME",
    "SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID", "HOME", "USER"})
HERE = ("$PWD", "${PWD}", "$(pwd)", "`pwd`")
_NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\}|\{([A-Za-z_]\w*)\[[@*]\]\})")
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?-([\w./:-]*)\}")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_BRACES = re.compile(r"\{[^{}\s]*(,|\.\.)[^{}\s]*\}")
_ANY_USE = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)|\$\(\(?|`|\$[@*#?!0-9{-]|\$\{[@*#?!0-9]")


@dataclass(frozen=True, slots=True)
class WordPiece:
    """One word of the program's command.

    Attributes:
        text: the word itself if it is literal, else source text for bash.
        placeholder: its replacement in a command that is started once per node.
    """

    kind: Literal["literal", "rank", "batch"]
    text: str
    placeholder: str = ""


@dataclass(frozen=True, slots=True)
class FixedValues:
    """Variables that hold one known text throughout the script.

    Attributes:
        texts: the words of each variable; one unless the variable is an array.
        directory: the working directory of the script's shell; None if unknown.
    """

    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    arrays: frozenset[str] = frozenset()
    directory: str | None = None


def pieces(source: str, fixed: FixedValues) -> tuple[WordPiece, ...]:
    """Return the pieces of a word of a command: one, unless a variable in it is split into several words."""
    if (found := fields(source, fixed)) is not None:
        return tuple(WordPiece("literal", text) for text in found)
    names, opaque = uses(source)
    if not opaque and names and names <= SAME_EVERYWHERE and not _globs(source):
        return (WordPiece("rank", source),)
    return (WordPiece("batch", source),)


def fields(source: str, fixed: FixedValues, *, value: bool = False) -> tuple[str, ...] | None:
    """Return the words that bash makes of a written word; None if the text does not determine them.

    Args:
        value: True for the value of an assignment, which undergoes neither word splitting nor file name expansion.
    """
    done: list[str] = []
    current: str | None = None
    at = 0
    quoted = False
    while at < len(source):
        letter = source[at]
        if letter == "'" and not quoted:
            end = source.find("'", at + 1)
            if end < 0:
                return None
            current, at = (current or "") + source[at + 1:end], end + 1
        elif letter == '"':
            quoted, current, at = not quoted, current or "", at + 1
        elif letter == "\\":
            following = source[at + 1:at + 2]
            if following == "\n":
                at += 2
                continue
            kept = "\\" if quoted and following not in ('"', "\\", "$", "`") else ""
            current, at = (current or "") + kept + following, at + 2
        elif (letter == "$" and source[at + 1:at + 2] not in ("", '"', " ", "'")) or letter == "`":
            found = _expansion(source, at, fixed)
            if found is None:
                return None
            texts, at = found
            if not quoted and not value:
                texts = tuple(part for text in texts for part in text.split())
                if any(_PATTERN.search(text) for text in texts):
                    return None
                if len(texts) == 0:
                    continue
            elif not texts:
                texts = ("",) if value else ()
            if value:
                texts = (" ".join(texts),)
            for number, text in enumerate(texts):
                if number:
                    done.append(current or "")
                    current = ""
                current = (current or "") + text
        elif not quoted and ((letter in "*?[" and not value) or letter == "$" or (letter == "~" and _is_home(source, at))
                             or (letter == "{" and not value and _BRACES.match(source, at)) or letter in "()<>|&;"):
            return None
        else:
            current, at = (current or "") + letter, at + 1
    if quoted:
        return None
    return (*done, current) if current is not None else tuple(done) or (("",) if value else ())


_PATTERN = re.compile(r"[*?\[]")


def _is_home(source: str, at: int) -> bool:
    return at == 0 or source[at - 1] in "=:"


def _globs(source: str) -> bool:
    return bool(re.search(r"[*?\[~]|" + _BRACES.pattern, re.sub(r"'[^']*'|\"[^\"]*\"", "", source)))


def _expansion(source: str, at: int, fixed: FixedValues) -> tuple[tuple[str, ...], int] | None:
    """Return the texts that the ``$`` expression at ``at`` expands to, and the index of its end."""
    for here in HERE:
        end = at + len(here)
        if source.startswith(here, at) and (here[-1] in ")}`" or not re.match(r"\w", source[end:end + 1])):
            return None if fixed.directory is None else ((fixed.directory,), end)
    if (found := _NAME.match(source, at)) is not None:
        name = found[1] or found[2] or found[3]
        texts = fixed.texts.get(name)
        if texts is None or (name in fixed.arrays) != bool(found[3]):
            return None
        return texts, found.end()
    if (found := _DEFAULT.match(source, at)) is not None and (texts := fixed.texts.get(found[1])):
        return (texts if texts[0] else (found[2],)), found.end()
    if (found := _ARITHMETIC.match(source, at)) is not None:
        number = arithmetic(found[1], {name: texts[0] for name, texts in fixed.texts.items() if texts})
        return None if number is None else ((str(number),), found.end())
    return None


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def arithmetic(text: str, values: Mapping[str, str]) -> int | None:
    """Evaluate an expression such as ``NNODES * 8``; None if the text does not determine it."""
    plain = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda found: values.get(found[1], "?"), text)
    if not re.fullmatch(r"[\d\s+\-*/()]{1,200}", plain):
        return None
    try:
        return _number(ast.parse(plain.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return int(_number(left) / _number(right))  # as bash divides
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_number(left), _number(right))
    raise ValueError(ast.dump(node))


def uses(source: str) -> tuple[frozenset[str], bool]:
    """Return the variables that bash expands in a text, and whether it expands anything else there (``$(…)``, ``$1``)."""
    names: set[str] = set()
    opaque = False
    for found in _ANY_USE.finditer(re.sub(r"(?<![\w\"])'[^']*'", "", source)):
        if found.start() and source[found.start() - 1:found.start()] == "\\":
            continue
        if found[1]:
            names.add(found[1])
            opaque = opaque or found[0].startswith(("${#", "${!"))
        else:
            opaque = True
    for inner in re.finditer(r"\$\(\(([^()]*)\)\)", source):
        names.update(re.findall(r"[A-Za-z_]\w*", inner[1]))
    return frozenset(names), opaque or bool(re.search(r"\$\{\w+[^\w}]", source))
