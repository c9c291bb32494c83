"""Variables that a script sets from text of its own, put in where it uses them: ``srun $ARGS bash -c "$COMMAND"``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace

from hpc_mp.lint.sbatch.shell import ShellAssignment
from hpc_mp.lint.sbatch.word import Word

MOST_LETTERS = 20_000  # of one value: a script may double a variable at every line
_WHOLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})")
_USE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?\})")

Variables = Mapping[str, tuple[Word, ...]]


def assign(known: MutableMapping[str, tuple[Word, ...]], each: ShellAssignment) -> None:
    """Note what a variable holds from here on, as far as the script's text tells."""
    words = expanded(each.words if each.array else [part for word in each.words for part in _split(word)], known)
    known[each.name] = _bounded(known.get(each.name, ()) + words if each.appended else words)


def expanded(words: Iterable[Word], known: Variables) -> tuple[Word, ...]:
    """The words, those that are nothing but a known variable replaced by its words, others with its text put in."""
    found: list[Word] = []
    for word in words:
        use = _WHOLE.fullmatch(word.text) if word.expands else None
        if use and (value := known.get(use[1] or use[2])) is not None:
            found += value
        elif word.expands:
            found.append(replace(word, text=substituted(word.text, known)[:MOST_LETTERS]))
        else:
            found.append(word)
    return _bounded(found)


def _bounded(words: Sequence[Word]) -> tuple[Word, ...]:
    lengths = itertools.accumulate(len(word.text) for word in words)
    return tuple(word for word, length in zip(words, lengths, strict=True) if length <= MOST_LETTERS)


def substituted(text: str, known: Variables) -> str:
    """The text with known variables put in, each on one line, so that the lines of the text stay what they were."""
    def value(use: re.Match[str]) -> str:
        words = known.get(use[1] or use[2])
        return use[0] if words is None else " ".join(word.text.replace("\n", " ") for word in words)

    return _USE.sub(value, text)


def _split(word: Word) -> list[Word]:
    """The words that an unquoted use of a variable with this value gives."""
    return [replace(word, text=part[0], line=word.line + word.text.count("\n", 0, part.start()),
                    expands=tuple((name, line) for name, line in word.expands if name in part[0]))
            for part in re.finditer(r"(?:\\[^\n]|[^\s\\])+", word.text)]
