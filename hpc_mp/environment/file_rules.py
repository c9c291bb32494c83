"""HM66x, HM67x: lines of NCCL's files that do not have the intended effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.environment.conf import MOST_TEXT, ConfFile, ConfLine

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ReadFile(NamedTuple):
    """A file, and the environment of the process that reads it, which may hide lines."""

    file: ConfFile
    environ: Mapping[str, str]


def _lines(applies: Callable[[ConfLine], object]) -> Callable[[ReadFile], Iterator[Hit]]:
    """Make a rule that yields the lines for which ``applies`` is true; ``{it}`` is the name, ``{advice}`` the quoted value."""
    return lambda read: (_hit(line, repr(line.value)) for line in read.file.lines if applies(line))


def _again(read: ReadFile) -> Iterator[Hit]:
    first: dict[str, int] = {}
    for line in read.file.lines:
        if line.name in first:
            yield _hit(line, str(first[line.name]))
        first.setdefault(line.name, line.number)


def _hidden(read: ReadFile) -> Iterator[Hit]:
    names: set[str] = set()
    for line in read.file.lines:
        if line.name not in names and read.environ.get(line.name) == "" and line.value:
            yield _hit(line, repr(line.value))
        names.add(line.name)


def _silent(read: ReadFile) -> Iterator[Hit]:
    return (Hit(number) for number in read.file.silent)


def _hit(line: ConfLine, advice: str) -> Hit:
    return Hit(line.number, line.name, advice, subject=line.name)


RULES: tuple[Rule[ReadFile], ...] = (
    Rule("HM661", "warning", _lines(lambda line: _NAME.fullmatch(line.name) is None),
         "the line sets a variable called {it}, which no library reads.",
         "Write NAME=VALUE from the first column on, without export and without blanks around the =."),
    Rule("HM662", "warning", _lines(lambda line: re.fullmatch(r"(['\"]).*\1\s*", line.value, re.DOTALL)),
         "{it} is set to {advice}, with its quotes.", "Remove the quotes: in its files, NCCL does not interpret them."),
    Rule("HM663", "warning", _lines(lambda line: line.value != line.value.strip()),
         "{it} is set to {advice}, with its blanks.",
         "Remove the blanks: they become part of the value, even at the end of the line."),
    Rule("HM664", "warning", _lines(lambda line: re.search(r"[$`]", line.value)),
         "{it} is set to {advice} literally: no shell reads this file.", "Write the value itself."),
    Rule("HM665", "warning", _lines(lambda line: re.search(r"\s#", line.value)),
         "{it} is set to {advice}: a # starts a comment only in the first column.", "Move the comment to a separate line."),
    Rule("HM666", "warning", _lines(lambda line: line.cut),
         f"{{it}} is truncated: NCCL reads {MOST_TEXT} bytes of a name or a value, and 4095 of a line.", "Shorten it."),
    Rule("HM667", "info", _lines(lambda line: _NAME.fullmatch(line.name) and not line.name.startswith("NCCL_")),
         "{it} is set when NCCL starts: code that reads it earlier does not see it.", "Set it in the job (environment.set)."),
    Rule("HM668", "warning", _again, "{it} is already set in line {advice}: the first setting counts.",
         "Remove one of the lines."),
    Rule("HM669", "warning", _hidden, "{it} is empty in the process, which hides {advice} here.",
         "unset it, unless that is intended."),
    Rule("HM670", "warning", _silent, "the line sets nothing.", "Write NAME=VALUE, or # in front of it."),
)
