"""The departure of a job at Slurm's request, and the restart decision after its ranks have ended: pure functions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_mp.cluster.slurm.records import Words
from hpc_mp.diagnosis.lines import CANCELLED, OURS
from hpc_mp.rundir import AttemptRecord
from hpc_mp.rundir.history import AttemptEnd
from hpc_mp.rundir.outcome import Cause

PREEMPTED = "Slurm preempted the job"
REASONS = {"PREEMPTION": PREEMPTED, "JOB REQUEUE": "the job was requeued (scontrol requeue)"}  # slurmstepd's reasons
QUEUED_AGAIN = "the job was requeued"


def departure(job: Words, restart: int, messages: Iterable[str]) -> str | None:
    """Return the reason why the job has to leave, as a clause; None if it may stay.

    During the grace time of a preemption only the ranks get SIGTERM, and only Slurm's record of the job has the reason. ``job``:
    that record; empty if Slurm does not answer. ``restart``: number of requeues before this start. ``messages``: slurmstepd's
    messages about the job since its start.
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


RestartAction = Literal["done", "requeue", "fail"]
STOPPED_BY_USER = "stopped by its user; continue with `hpc-mp launch --resume`"
IDLE_STOPS = 3  # stops in a row without progress: the time limit is too short for one step, or the job is always interrupted


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision. ``why``: one sentence for the log."""

    action: RestartAction
    why: str


def decide(ending: Literal["completed", "stopped"] | Cause, *, cancelled: bool, retries: int,
           stalled: Sequence[AttemptEnd], saved: int | None, lacking: str, returned: Sequence[str] = (),
           departed: bool = False) -> Decision:
    """Decide if the job is requeued or ends.

    After a stop with a save the job is requeued as long as it makes progress. A failure of machines is requeued too, at most
    ``retries`` times in a row without progress. A failure of the program ends the job: it would happen again.

    Args:
        ending: how this attempt ended.
        cancelled: True if the user wants the run to stop.
        retries: value of slurm.retries.
        stalled: earlier ends since which the run has made no progress, without this one.
        saved: step of the newest checkpoint; 0 without any, None if the saved state is unknown.
        lacking: the missing progress since then, in words; empty if the run's progress is unknown.
        returned: nodes of this attempt that had failed before and came back: its failure is not counted.
        departed: True if Slurm wanted the job to leave.
    """
    if ending == "completed":
        return Decision("done", "the run is complete")
    if cancelled:
        return Decision("done", STOPPED_BY_USER)
    if ending == "stopped":
        if saved is None:  # a program may save far more often than it reports a step
            return Decision("requeue", "it continues from its saved state")
        if not departed and sum(end.kind == "stopped" and not end.departed for end in stalled) >= IDLE_STOPS:
            return Decision("fail", f"stopped {IDLE_STOPS + 1} times{lacking}: raise job.time_limit")
        return Decision("requeue", f"step {saved} is saved" if saved else "no checkpoint yet")
    if not ending.retry:
        return Decision("fail", "a failure of the program would recur: not requeued")
    if returned:
        return Decision("requeue", f"not counted as a failure: {', '.join(returned)} failed before and had just come back")
    failed = sum(end.counts for end in stalled)
    if failed >= retries:
        return Decision("fail", f"failed {failed + 1} times{lacking} (slurm.retries = {retries})")
    return Decision("requeue", f"machine failure {failed + 1} of {retries}{lacking}")
