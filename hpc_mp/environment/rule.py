"""What a rule about variables is: a row of a table. The linters of job scripts and templates have rows of the same form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Severity = Literal["error", "warning", "info"]


class Setting(Protocol):
    """A variable that somebody sets."""

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> str: ...

    @property
    def line(self) -> int:
        """Where: a line of a script, or the number of the setting among others."""


class Hit(NamedTuple):
    """Where a rule applies: the line, the words that fill ``{it}`` and ``{advice}`` in the rule's texts, the file if it is
    not the one that is judged."""

    line: int
    it: str = ""
    advice: str = ""
    file: str = ""


@dataclass(frozen=True, slots=True)
class VariableRule:
    """One row: ``find`` says where it applies, ``{it}`` and ``{advice}`` in the texts are filled in from the hit.

    Attributes:
        code: ``HM`` and three digits; a code never changes its meaning.
        severity: ``error`` is wrong on any cluster, ``warning`` depends on the site or the case, ``info`` is style.
        message: what stands there and why it hurts.
        fix: what to do about it.
    """

    code: str
    severity: Severity
    find: Callable[[Sequence[Setting]], Iterable[Hit]]
    message: str
    fix: str


def filled(text: str, hit: Hit) -> str:
    """A rule's text with the words of a hit; what it begins with becomes a capital."""
    advice = hit.advice[:1].upper() + hit.advice[1:] if text.startswith("{advice}") else hit.advice
    return text.replace("{advice}", advice).replace("{it}", hit.it)
