"""One word of a script, with its position."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Word:
    """A word as the program gets it, except that shell expansions are left as written.

    Attributes:
        text: the text without quotes; ``$NAME`` and ``$(…)`` stay.
        line: the line, counted from 1.
        expands: the variables that the shell expands in this word, each with its line.
        evaluated: each ``$(…)`` in the text that the shell replaces by its output.
    """

    text: str
    line: int
    expands: tuple[tuple[str, int], ...] = ()
    evaluated: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """The last part of a path: ``torchrun`` for ``/usr/bin/torchrun``."""
        return self.text.rpartition("/")[2]
