"""What the linter says, and what a rule is: a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from hpc_mp.launch.lint.script import Script

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a script.

    Attributes:
        code: ``HM`` and three digits; a code never changes its meaning.
        line: counted from 1.
        severity: ``error`` is wrong on any cluster, ``warning`` depends on the site or the case, ``info`` is style.
        message: what stands there and why it hurts.
        fix: what to do about it.
    """

    code: str
    line: int
    severity: Severity
    message: str
    fix: str


class Hit(NamedTuple):
    """Where a rule applies: the line, and the words that fill ``{it}`` and ``{advice}`` in the rule's texts."""

    line: int
    it: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table; ``find`` says where it applies, ``{it}`` and ``{advice}`` are filled in from the hit."""

    code: str
    severity: Severity
    find: Callable[[Script], Iterable[Hit]]
    message: str
    fix: str

    def findings(self, script: Script) -> list[Finding]:
        return [Finding(self.code, hit.line, self.severity, _filled(self.message, hit), _filled(self.fix, hit))
                for hit in self.find(script)]


def _filled(text: str, hit: Hit) -> str:
    advice = hit.advice[:1].upper() + hit.advice[1:] if text.startswith("{advice}") else hit.advice
    return text.replace("{advice}", advice).replace("{it}", hit.it)
