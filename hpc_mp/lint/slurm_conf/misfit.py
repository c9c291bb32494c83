"""What is set up wrongly for training: one statement, and the table that makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from hpc_mp.lint.slurm_conf.config import Told

Severity = Literal["error", "warning", "info"]
WEIGHT: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Misfit:
    """Attributes:
        code: stable: small words with hyphens.
        severity: ``error``: jobs fail or are wrong; ``warning``: jobs suffer; ``info``: worth to know, and a site's choice.
        seen: what is set, as Slurm shows it.
        why: what follows for training.
        remedy: what an administrator, or the user, can do.
    """

    code: str
    severity: Severity
    seen: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Rule:
    """``look`` yields what is set wrongly, as Slurm shows it, once per place; nothing where all is well or not known."""

    code: str
    severity: Severity
    look: Callable[[Told], Iterator[str]]
    why: str
    remedy: str

    def apply(self, told: Told) -> Iterator[Misfit]:
        for seen in self.look(told):
            yield Misfit(self.code, self.severity, seen, self.why, self.remedy)
