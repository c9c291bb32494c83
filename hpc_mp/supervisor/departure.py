"""Departure of a job at Slurm's request: the ends of its ranks then say nothing about the run, which continues."""

from collections.abc import Iterable, Sequence

from hpc_mp.cluster.slurm.records import Words
from hpc_mp.diagnosis.lines import CANCELLED, OURS
from hpc_mp.rundir import AttemptRecord

PREEMPTED = "Slurm preempted the job"
REASONS = {"PREEMPTION": PREEMPTED, "JOB REQUEUE": "the job was requeued (scontrol requeue)"}  # slurmstepd's reasons
QUEUED_AGAIN = "the job was requeued"


def departure(job: Words, restart: int, messages: Iterable[str]) -> str | None:
    """Return the reason why the job has to leave, as a clause; None if it may stay.

    During the grace time of a preemption only the ranks get SIGTERM, and only Slurm's record of the job has the reason.

    Args:
        job: Slurm's record of the job; empty if Slurm does not answer.
        restart: number of requeues before this start.
        messages: slurmstepd's messages about the job since its start.
    """
    reasons = [match[2] for match in map(CANCELLED.search, messages) if match]
    cause = next((REASONS[reason] for reason in reasons if reason in REASONS), None)
    if cause is None and job.get("PreemptTime", "None") not in ("", "None"):
        cause = PREEMPTED
    if cause is None and int(job.get("Restarts") or 0) > restart:
        cause = QUEUED_AGAIN
    return cause


def has_expired(messages: Iterable[str]) -> bool:
    """Return True if slurmstepd reports that the job was ended for its time limit."""
    return any((match := CANCELLED.search(line)) is not None and match[2] == "TIME LIMIT" for line in messages)


def since_begin(lines: Sequence[str], record: AttemptRecord) -> Sequence[str]:
    """Return the lines of other programs in the job script's log since an attempt began."""
    begins = [number for number, line in enumerate(lines) if f"attempt {record.attempt} (token {record.token}) on " in line]
    return [line for line in lines[begins[-1]:] if not line.startswith(OURS)] if begins else ()
