"""A broken machine: a recorded one, what was done to it, and what must be said of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One change and its finding.

    Attributes:
        evidence, subject: parts of ``subject: evidence`` and of the subject.
        also: other checks that rightly notice it.
        many: the number of findings, if the check looks at it alone.
    """

    code: str
    kind: str
    edits: Mapping[str, Any]
    outcome: str
    evidence: str
    subject: str = ""
    also: Collection[str] = ()
    many: int = 1

    def __str__(self) -> str:
        return f"{self.code}-{self.kind}-{self.evidence[:24]}"
