"""Options of sbatch and srun, parsed as getopt_long does: short, abbreviated, or with a separate value. Programs of srun."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from hpc_mp.base.assets import asset_table

TABLE = "slurm/sbatch-options.toml"
SYNTAX = "slurm/option-syntax.toml"
Program = Literal["sbatch", "srun"]
# Programs in a file, an executable that is copied, a terminal, an image that lacks what the host has; no tasks at all.
ALONE = frozenset({"multi-prog", "bcast", "pty", "test-only", "help", "usage", "version", "no-allocate"})


class OptionWord(Protocol):
    """A word of a command, and its line in the script."""

    @property
    def text(self) -> str: ...

    @property
    def line(self) -> int: ...


AnyWord = TypeVar("AnyWord", bound=OptionWord)


@dataclass(frozen=True, slots=True)
class PlainWord:
    """A word of a command that is in no script."""

    text: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class Option:
    """One option as given."""

    name: str  # its long name, or the written name if it is unknown
    value: str | None
    line: int
    is_known: bool
    value_line: int | None = None  # the line of its value, if the value is a separate word


@dataclass(frozen=True, slots=True)
class Syntax:
    names: frozenset[str]
    letters: Mapping[str, str]
    aliases: Mapping[str, str]
    without_value: frozenset[str]
    optional_value: frozenset[str]


def option_table() -> dict[str, Any]:
    """Return the data of ``slurm/option-syntax.toml``."""
    return asset_table(SYNTAX)


@functools.cache
def releases() -> dict[str, str]:
    """Return for each option of sbatch the first release that has it; "" for 22.05; "-24.05" if only releases before 24.05 do."""
    table = asset_table(TABLE)
    return {**dict.fromkeys(table["refused"], ""), **table["options"], **dict.fromkeys(option_table()["names"]["sbatch"], "")}


@functools.cache
def syntax(program: Program) -> Syntax:
    table = option_table()
    names, values = table["names"], table["values"]
    sbatch = {*releases(), *names["sbatch"], *names["plugins"]}
    if program == "sbatch":
        return Syntax(frozenset(sbatch), table["letters"], names["aliases"],
                      frozenset(values["none"] + values["none_of_sbatch"]), frozenset(values["optional"]))
    return Syntax(frozenset(sbatch - set(names["not_srun"]) | set(names["srun"])),
                  table["letters"] | table["letters_of_srun"], names["aliases"],
                  frozenset(values["none"]), frozenset(values["optional"]))


def parse(words: Sequence[AnyWord], syntax: Syntax, *, permute: bool) -> tuple[tuple[Option, ...], tuple[AnyWord, ...]]:
    """Return the options among the words, and the words that are not options. ``permute``: True if options may follow other words
    (sbatch directives). Otherwise the first other word ends them (srun, whose program has its own options)."""
    options: list[Option] = []
    rest: list[AnyWord] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word.text == "--":
            return tuple(options), (*rest, *words[at:])
        if len(word.text) < 2 or word.text[0] != "-":
            rest.append(word)
            if permute:
                continue
            return tuple(options), (*rest, *words[at:])
        following = words[at] if at < len(words) else None
        parsed, used = _long(word, following, syntax) if word.text.startswith("--") else _short(word, following, syntax)
        options += parsed
        at += used
    return tuple(options), tuple(rest)


def _long(word: OptionWord, following: OptionWord | None, syntax: Syntax) -> tuple[list[Option], int]:
    written, equals, value = word.text[2:].partition("=")
    name = _full(written, syntax)
    if equals:
        return [Option(name or written, value, word.line, name is not None)], 0
    if name is None:  # an option of a plug-in: its value, if any, can only be guessed
        apart = following is not None and following.line == word.line and not following.text.startswith("-")
        return [Option(written, following.text if following and apart else None, word.line, False)], int(apart)
    if name in syntax.without_value | syntax.optional_value or following is None:
        return [Option(name, None, word.line, True)], 0
    return [Option(name, following.text, word.line, True, following.line)], 1


def _full(written: str, syntax: Syntax) -> str | None:
    """Return the long name, also for an unambiguous abbreviation."""
    candidates = {written} & syntax.names or {name for name in syntax.names if written and name.startswith(written)}
    names = {syntax.aliases.get(name, name) for name in candidates}
    return names.pop() if len(names) == 1 else None


def _short(word: OptionWord, following: OptionWord | None, syntax: Syntax) -> tuple[list[Option], int]:
    """Parse ``-N4``, ``-N 4``, and several letters without values in one word."""
    options: list[Option] = []
    for at, letter in enumerate(word.text[1:], start=2):
        name = syntax.letters.get(letter)
        if name is None:
            return [*options, Option(word.text, None, word.line, False)], 0
        if name in syntax.without_value:
            options.append(Option(name, None, word.line, True))
            continue
        attached = word.text[at:] or None
        if attached or name in syntax.optional_value or following is None:
            return [*options, Option(name, attached, word.line, True)], 0
        return [*options, Option(name, following.text, word.line, True, following.line)], 1
    return options, 0


def programs_of_srun(words: Sequence[str]) -> tuple[int, ...] | None:
    """Return where the programs begin among srun's arguments: one index per component (``srun -n1 ./a : -n3 ./b``). None if srun
    starts no program, or a program that no wrapper may precede, or if an option is unknown and may have a value."""
    places, begin = [], 0
    while begin < len(words):
        end = next((at for at in range(begin, len(words)) if words[at] == ":"), len(words))
        options, program = parse([PlainWord(word) for word in words[begin:end]], syntax("srun"), permute=False)
        if not program or any(
                not option.is_known or option.name in ALONE or option.name.startswith("container") for option in options):
            return None
        places.append(end - len(program))
        begin = end + 1
    return tuple(places) or None
