"""The ``#SBATCH`` lines of a script, parsed as sbatch parses them (src/sbatch/opt.c), with what it refuses; and srun lines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_mp.cluster.slurm.option_syntax import Option, parse, syntax
from hpc_mp.lint.sbatch.shell import Command, Word

MAGIC = "#SBATCH"
_SEPARATOR = re.compile(r"\s*(hetjob|packjob)(\s|$)", re.IGNORECASE)


class Unmatched(ValueError):
    """An unclosed quote: sbatch refuses the script."""


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a script that sbatch reads."""

    # the options of each component of the job, in order; only a heterogeneous job has several
    components: tuple[tuple[Option, ...], ...]
    words: tuple[Word, ...]  # every word of every directive
    strays: tuple[Word, ...]  # words that are not options; sbatch refuses them
    unmatched: tuple[int, ...]  # lines with an unclosed quote
    end: int  # the line of the first command, at which sbatch stops reading; one past the last line if no command exists


def read_header(lines: Sequence[str]) -> Header:
    end = next((number for number, line in enumerate(lines, start=1) if line.strip() and line.lstrip()[0] != "#"),
               len(lines) + 1)
    components: list[list[Word]] = [[]]
    unmatched = []
    for number, line in enumerate(lines[:end - 1], start=1):
        if not line.startswith(MAGIC):
            continue
        text = line[len(MAGIC):]
        if separator := _SEPARATOR.match(text):
            components.append([])
            text = text[separator.end():]
        try:
            components[-1] += [Word(word, number) for word in arguments(text)]
        except Unmatched:
            unmatched.append(number)
    parsed = [parse(words, syntax("sbatch"), permute=True) for words in components]
    return Header(tuple(options for options, _ in parsed), tuple(word for words in components for word in words),
                  tuple(word for _, rest in parsed for word in rest), tuple(unmatched), end)


def arguments(text: str) -> list[str]:
    """Split a directive into words by sbatch's own rules: ``get_argument`` in src/sbatch/opt.c. A backslash also escapes between
    quotes. ``#`` outside quotes ends the line, even inside a word. Raises Unmatched if a quote is unclosed."""
    words: list[str] = []
    word = quote = ""
    inside = escaped = False
    for letter in text:
        if escaped:
            word, escaped = word + letter, False
        elif letter == "\\":
            inside = escaped = True
        elif quote:
            word, quote = (word, "") if letter == quote else (word + letter, quote)
        elif letter in "\"'":
            inside, quote = True, letter
        elif letter == "#":
            break
        elif letter.isspace():
            words += [word] if inside else []
            word, inside = "", False
        else:
            word, inside = word + letter, True
    if quote:
        raise Unmatched(quote)
    return [*words, word] if inside else words


@dataclass(frozen=True, slots=True)
class Step:
    """An srun call."""

    command: Command
    options: tuple[Option, ...]
    program: tuple[Word, ...]  # the words that every task runs
    opaque: bool  # True if options may be in a variable of unknown value

    @property
    def line(self) -> int:
        return self.command.words[0].line

    def option(self, name: str) -> Option | None:
        """Return the last option of that name: srun uses the last."""
        return next((option for option in reversed(self.options) if option.name == name), None)

    def value(self, name: str) -> str | None:
        option = self.option(name)
        return option.value if option else None


def read_step(command: Command) -> Step:
    options, program = parse(command.words[1:], syntax("srun"), permute=False)
    return Step(command, options, program, bool(program) and program[0].text.startswith("$"))
