"""One job as Slurm sees it, and what its reasons mean."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpc_mp.base.assets import asset

REASONS = "slurm/queue-reasons.toml"
FORGOTTEN = "FORGOTTEN"  # our word: Slurm no longer knows the job; its run directory tells how it ended
STOPPING = frozenset({"CANCELLED", "PREEMPTED", "TIMEOUT", "DEADLINE"})  # ends that Slurm or its user chose
UNKNOWN = "UNKNOWN"  # our word: Slurm does not answer just now
FINAL = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
                   "PREEMPTED", "REVOKED", "TIMEOUT", FORGOTTEN})
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job as Slurm sees it.

    Attributes:
        id: ``7``; of an array's task ``7_2``; of a component of a heterogeneous job ``7+1``.
        state: in Slurm's words (``PENDING``, ``RUNNING`` …), or FORGOTTEN or UNKNOWN.
        reason: why it waits or how it ended, in Slurm's words; empty when there is nothing to say.
        meaning, remedy: the same for people; empty for a reason that nobody has written down.
        start: unix seconds: when it started, or is thought to start; None when nobody knows.
        exit_code: of the job script, negative for a signal; None while it has none.
        parts: of an array or a heterogeneous job, each for itself.
    """

    id: str
    state: str
    reason: str = ""
    meaning: str = ""
    remedy: str = ""
    start: float | None = None
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    exit_code: int | None = None
    parts: tuple[SlurmJob, ...] = ()

    @property
    def ended(self) -> bool:
        return self.state in FINAL

    @property
    def waits(self) -> bool:
        return self.state in WAITING


@functools.cache
def reasons() -> Mapping[str, tuple[str, str]]:
    """(meaning, remedy) by the normalized name of a reason."""
    table = tomllib.loads(asset(REASONS).read_text(encoding="utf-8"))
    return {_normal(name): (meaning, remedy) for name, (meaning, remedy) in table.items()}


def explained(job: SlurmJob) -> SlurmJob:
    """The job with the meaning and the remedy of its reason; ``None`` is a reason only for one that waits."""
    if _normal(job.reason) == "none" and not job.waits:
        return replace(job, reason="")
    named = re.split(r"[,(:]", job.reason)[0]  # "ReqNodeNotAvail, UnavailableNodes:n3", "RaisedSignal:9(Killed)"
    meaning, remedy = reasons().get(_normal(named), ("", ""))
    return replace(job, meaning=meaning, remedy=remedy.replace("JOB", job.id))


def _normal(name: str) -> str:
    return re.sub(r"[ _]", "", name).casefold()
