"""What the linter says, and what a rule is: a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_mp.environment.rule import Hit, Severity, filled

if TYPE_CHECKING:
    from hpc_mp.lint.sbatch.script import Script

__all__ = ["Finding", "Hit", "Rule", "Severity"]


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


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table; ``find`` says where it applies, ``{it}`` and ``{advice}`` are filled in from the hit."""

    code: str
    severity: Severity
    find: Callable[[Script], Iterable[Hit]]
    message: str
    fix: str

    def findings(self, script: Script) -> list[Finding]:
        return [Finding(self.code, hit.line, self.severity, filled(self.message, hit), filled(self.fix, hit))
                for hit in self.find(script)]
