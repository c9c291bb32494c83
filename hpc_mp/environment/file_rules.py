"""HM66x, HM67x: lines of NCCL's files that do not say what their author meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hpc_mp.environment.conf import MOST_TEXT, ConfFile, ConfLine
from hpc_mp.environment.rule import Severity

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class LineRule:
    """One row: ``applies`` to a line that sets something; ``{name}`` and ``{value}`` are filled in from it."""

    code: str
    severity: Severity
    applies: Callable[[ConfLine], object]
    message: str
    fix: str


LINE_RULES = (
    LineRule("HM661", "warning", lambda line: _NAME.fullmatch(line.name) is None,
             "the line sets a variable called {name}, which nobody reads.",
             "Write NAME=VALUE from the first column on, without export and without blanks around the =."),
    LineRule("HM662", "warning", lambda line: re.fullmatch(r"(['\"]).*\1\s*", line.value, re.DOTALL),
             "{name} is set to {value}, with its quotes.",
             "Leave the quotes out: NCCL's files know none."),
    LineRule("HM663", "warning", lambda line: line.value != line.value.strip(),
             "{name} is set to {value}, with its blanks.",
             "Leave the blanks out: they belong to the value, also at the end of the line."),
    LineRule("HM664", "warning", lambda line: re.search(r"[$`]", line.value),
             "{name} is set to {value} as it stands there: no shell reads this file.",
             "Write the value itself."),
    LineRule("HM665", "warning", lambda line: re.search(r"\s#", line.value),
             "{name} is set to {value}: a # counts in the first column only.",
             "Give the comment a line of its own."),
    LineRule("HM666", "warning", lambda line: line.cut,
             f"{{name}} is cut: NCCL takes {MOST_TEXT} bytes of a name or a value, and 4095 of a line.",
             "Write it shorter."),
    LineRule("HM667", "info", lambda line: _NAME.fullmatch(line.name) and not line.name.startswith("NCCL_"),
             "{name} is set when NCCL starts: what reads it before has not seen it.",
             "Set it in the job (environment.set)."),
)


@dataclass(frozen=True, slots=True)
class LineFault:
    """What is wrong with a line of a file."""

    code: str
    severity: Severity
    line: int
    name: str
    message: str
    fix: str


def faults(file: ConfFile, environ: Mapping[str, str]) -> Iterator[LineFault]:
    """Of one file, line by line. ``environ``: of the process, which may hide lines."""
    first: dict[str, int] = {}
    for line in file.lines:
        for rule in LINE_RULES:
            if rule.applies(line):
                text = rule.message.replace("{name}", line.name).replace("{value}", repr(line.value))
                yield LineFault(rule.code, rule.severity, line.number, line.name, text, rule.fix)
        if line.name in first:
            yield LineFault("HM668", "warning", line.number, line.name,
                            f"{line.name} has been set in line {first[line.name]} already: the first one counts.",
                            "Remove one of the lines.")
        elif environ.get(line.name) == "" and line.value:
            yield LineFault("HM669", "warning", line.number, line.name,
                            f"{line.name} is empty in the process, which hides {line.value!r} here.",
                            "unset it, unless that is meant.")
        first.setdefault(line.name, line.number)
    for number in file.silent:
        yield LineFault("HM670", "warning", number, "", "the line sets nothing.", "Write NAME=VALUE, or # in front of it.")
