"""Why a job has to go: what its ranks end with says nothing of the run then, and the run goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpc_mp.cluster.slurm.records import Words
from hpc_mp.diagnosis.lines import CANCELLED, OURS
from hpc_mp.rundir import AttemptRecord

PREEMPTED = "Slurm preempted the job"
REASONS = {"PREEMPTION": PREEMPTED, "JOB REQUEUE": "the job was queued again (scontrol requeue)"}  # by slurmstepd's words
QUEUED_AGAIN = "the job was queued again"


def departure(job: Words, restart: int, said: Iterable[str]) -> str | None:
    """Return why the job has to go, as half a sentence; None if it may stay.

    During the grace time of a preemption the ranks alone get SIGTERM, and only Slurm's record of the job tells why.

    Args:
        job: Slurm's record of it; empty if Slurm does not answer.
        restart: how often it was queued again before this start.
        said: what slurmstepd has said of the job since its start.
    """
    reasons = [found[2] for found in map(CANCELLED.search, said) if found]
    known = next((REASONS[reason] for reason in reasons if reason in REASONS), None)
    if known is None and job.get("PreemptTime", "None") not in ("", "None"):
        known = PREEMPTED
    if known is None and int(job.get("Restarts") or 0) > restart:
        known = QUEUED_AGAIN
    return known


def has_expired(said: Iterable[str]) -> bool:
    """Return True if slurmstepd says that the job was ended for its time limit."""
    return any((found := CANCELLED.search(line)) is not None and found[2] == "TIME LIMIT" for line in said)


def since_begin(lines: Sequence[str], record: AttemptRecord) -> Sequence[str]:
    """Return the lines of others in the job script's log since an attempt began."""
    begins = [number for number, line in enumerate(lines) if f"attempt {record.attempt} (token {record.token}) on " in line]
    return [line for line in lines[begins[-1]:] if not line.startswith(OURS)] if begins else ()
