"""What a check says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "warning", "error", "incomplete"]
WEIGHT: dict[Outcome, int] = {"ok": 0, "incomplete": 1, "warning": 2, "error": 3}


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about a machine.

    Attributes:
        code: of the check, stable, such as ``gpu-ecc``: lower case words with hyphens.
        outcome: ``incomplete`` is a check that could not see what it needs; ``evidence`` then says what.
        subject: what it is about: "GPU 3 (0000:c6:00.0)", "mlx5_2 port 1", "/tmp"; empty for the machine as a whole.
        evidence: what was seen, with its numbers, and the rule that it meets or breaks.
        remedy: what to do about it; empty when all is well.
    """

    code: str
    outcome: Outcome
    subject: str
    evidence: str
    remedy: str = ""


def worst(findings: Iterable[Finding]) -> Outcome:
    """The gravest outcome: an error weighs more than a warning, a warning more than a check that saw nothing."""
    return max((finding.outcome for finding in findings), key=WEIGHT.__getitem__, default="ok")
