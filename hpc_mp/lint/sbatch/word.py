"""One word of a script, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Word:
    """A word as the program gets it, except that what the shell expands is left as it was written.

    Attributes:
        text: without quotes; ``$NAME`` and ``$(…)`` stay.
        line: counted from 1.
        expands: the variables that the shell which reads this word replaces in it, each with its line.
        quoted: in quotes as a whole, so that the shell does not split it.
        evaluated: each ``$(…)`` in the text whose output that shell puts there.
    """

    text: str
    line: int
    expands: tuple[tuple[str, int], ...] = ()
    quoted: bool = False
    evaluated: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """The last part of a path: ``torchrun`` of ``/usr/bin/torchrun``."""
        return self.text.rpartition("/")[2]
