"""What the linter says, and what a rule is: a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_mp.environment.rule import Hit, Severity, filled

if TYPE_CHECKING:
    from hpc_mp.clouds.azure.context import Case

_LONGEST = 240

__all__ = ["Finding", "Hit", "Rule", "Severity"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a cluster's description.

    Attributes:
        code: ``CC`` and three digits; a code never changes its meaning.
        file: the template, the file of parameters or a file of the project, as it was named.
        line: counted from 1.
        severity: ``error`` is wrong on any subscription, ``warning`` depends on the case, ``info`` is good to know.
        message: what stands there and why it hurts.
        fix: what to do about it.
    """

    code: str
    file: str
    line: int
    severity: Severity
    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table; ``find`` says where it applies, ``{it}`` and ``{advice}`` are filled in from the hit."""

    code: str
    severity: Severity
    find: Callable[[Case], Iterable[Hit]]
    message: str
    fix: str

    def findings(self, case: Case) -> list[Finding]:
        hits = (hit._replace(it=_short(hit.it), advice=_short(hit.advice)) for hit in self.find(case))
        return [Finding(self.code, hit.file or case.file, max(hit.line, 1), self.severity, filled(self.message, hit),
                        filled(self.fix, hit)) for hit in hits]


def _short(text: str) -> str:
    """A value is quoted up to a length at which the line can still be read."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
