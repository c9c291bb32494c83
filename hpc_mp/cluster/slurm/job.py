"""One job as Slurm sees it, the meaning of its reasons, and the parsers for output of squeue, scontrol and sacct."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from hpc_mp.base.assets import asset_table
from hpc_mp.cluster.slurm.nodelist import expanded

REASONS = "slurm/queue-reasons.toml"
FORGOTTEN = "FORGOTTEN"  # our own state: Slurm no longer knows the job; its run directory records its end
STOPPING = frozenset({"CANCELLED", "PREEMPTED", "TIMEOUT", "DEADLINE"})  # ends that Slurm or its user chose
UNKNOWN = "UNKNOWN"  # our own state: Slurm does not answer at the moment
FINAL = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
                   "PREEMPTED", "REVOKED", "TIMEOUT", FORGOTTEN})
AGAIN = "OfRestarted"  # suffix of a reason: its meaning for a job that has run before
COMPLETING = "COMPLETING"  # its processes have ended, or are being ended; its nodes are being cleaned up
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job as Slurm sees it."""

    id: str  # ``7``; of an array's task ``7_2``; of a component of a heterogeneous job ``7+1``
    state: str  # in Slurm's words (``PENDING``, ``RUNNING`` …), or FORGOTTEN or UNKNOWN
    reason: str = ""  # why it waits or how it ended, in Slurm's words; empty without a reason
    # meaning, remedy: explanation of the reason; empty for a reason without an explanation
    meaning: str = ""
    remedy: str = ""
    start: float | None = None  # unix time in seconds of the actual or expected start; None if unknown
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    exit_code: int | None = None  # of the job script, negative for a signal; None while it has none
    parts: "tuple[SlurmJob, ...]" = ()  # the parts of an array or a heterogeneous job

    @property
    def ended(self) -> bool:
        return self.state in FINAL

    @property
    def waits(self) -> bool:
        return self.state in WAITING


@functools.cache
def reasons() -> Mapping[str, tuple[str, str]]:
    """Return (meaning, remedy) by the normalized name of a reason."""
    return {_normal(name): (meaning, remedy) for name, (meaning, remedy) in asset_table(REASONS).items()}


def explained(job: SlurmJob) -> SlurmJob:
    """Return the job with the meaning and the remedy of its reason. ``None`` is a reason only for a job that waits."""
    if _normal(job.reason) == "none" and not job.waits:
        return replace(job, reason="")
    named = re.split(r"[,(:]", job.reason)[0]  # "ReqNodeNotAvail, UnavailableNodes:n3", "RaisedSignal:9(Killed)"
    again = reasons().get(_normal(f"{named}{AGAIN}")) if job.restarts else None
    meaning, remedy = again or reasons().get(_normal(named), ("", ""))
    return replace(job, meaning=meaning, remedy=remedy.replace("JOB", job.id))


def _normal(name: str) -> str:
    return re.sub(r"[ _]", "", name).casefold()


LINE = ",".join(f"{field}:|" for field in (  # input of parse_lines; the mark after a colon ends each field
    "JobArrayID", "State", "StartTime", "NodeList", "RestartCnt", "exit_code", "Reason"))
RECORD = "JobID,State,Start,NodeList,ExitCode"  # input of parse_sacct


def parse_lines(text: str) -> list[SlurmJob]:
    """Parse ``squeue --Format=LINE``. Raises ValueError if no line has that format."""
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 7]
    if text.strip() and not rows:
        raise ValueError("squeue has an unexpected form")
    return [explained(SlurmJob(job_id, state, reason, start=time_of(start), nodes=_nodes(nodes), restarts=int(restarts),
                               exit_code=_exit_code(code) if state in FINAL else None))
            for job_id, state, start, nodes, restarts, code, reason, _ in rows]


def parse_scontrol(text: str) -> list[SlurmJob]:
    """Parse ``scontrol show job --oneliner``: a line per job, or per component or task of a job."""
    return [_from_scontrol(dict(re.findall(r"(\w+)=(\S*)", line))) for line in text.splitlines() if "JobState=" in line]


def _from_scontrol(facts: Mapping[str, str]) -> SlurmJob:
    job_id = facts["JobId"]
    if "ArrayJobId" in facts:
        task = facts.get("ArrayTaskId", "")
        job_id = f"{facts['ArrayJobId']}_{task if task.isdigit() else f'[{task}]'}"
    elif "HetJobId" in facts:
        job_id = f"{facts['HetJobId']}+{facts['HetJobOffset']}"
    state = facts["JobState"]
    return explained(SlurmJob(job_id, state, facts.get("Reason", ""), start=time_of(facts.get("StartTime", "")),
                              nodes=_nodes(facts.get("NodeList", "")), restarts=int(facts.get("Restarts", 0)),
                              exit_code=_exit_code(facts.get("ExitCode", "")) if state in FINAL else None))


def parse_sacct(text: str) -> list[SlurmJob]:
    """Parse ``sacct --parsable2 --format=RECORD``; ``CANCELLED by 0`` is CANCELLED."""
    rows = (line.split("|") for line in text.splitlines() if line.count("|") == 4)
    return [SlurmJob(job_id, state.partition(" ")[0], start=time_of(start), nodes=_nodes(nodes), exit_code=_exit_code(code))
            for job_id, state, start, nodes, code in rows]


def time_of(text: str) -> float | None:
    """Parse a time of Slurm, which is local time, or ``N/A`` and ``Unknown``."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _nodes(text: str) -> tuple[str, ...]:
    return () if text in ("", "(null)", "None assigned") else expanded(text)


def _exit_code(text: str) -> int | None:
    """Parse an exit code. ``0:9`` means killed by signal 9; ``squeue --Format`` of 22.05 prints the status of wait(2) instead."""
    code, colon, number = text.partition(":")
    if code.isdigit() and not colon:
        return -(int(code) & 127) or int(code) >> 8
    return -int(number or 0) or int(code) if code.isdigit() else None
