"""Jobs as Slurm sees them: one query for the states of all, for any release of Slurm, with or without accounting; and the meaning
of their reasons.

``squeue`` is asked first, then ``scontrol`` for the jobs that squeue does not list, then ``sacct``. Each may be absent.
"""

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from hpc_mp.base.assets import asset_table
from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.nodelist import expanded
from hpc_mp.cluster.slurm.query import last_line

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


DELAYS_S = (2, 5, 10, 30)  # between two polls, the last one repeated: schedulers serve many users
PATIENCE_S = 20.0  # timeout of an answer: a busy controller takes seconds for a long queue
GONE = "Invalid job id"  # error of every program of Slurm for an unknown job

patient: Runner = functools.partial(ask, timeout=PATIENCE_S)


def job_states(job_ids: Collection[str], ask: Runner = patient) -> dict[str, SlurmJob]:
    """Return the state of each job, by the requested id. Never raises: see FORGOTTEN and UNKNOWN."""
    jobs: dict[str, SlurmJob] = {}
    denied: set[str] = set()
    silence = ""
    for source, decides in ((_squeue, True), (_scontrol, True), (_sacct, False)):
        missing = [job_id for job_id in job_ids if job_id not in jobs]
        if not missing:
            break
        try:
            records = source(missing, ask)
        except CommandFailed as error:
            if GONE in str(error):
                denied.update(missing)
            else:
                silence = silence or last_line(error)
            continue
        for job_id in missing:
            parts = [record for record in records if _is_part(record.id, job_id)]
            if parts:
                jobs[job_id] = _whole(job_id, parts)
            elif decides:
                denied.add(job_id)
    return {job_id: jobs.get(job_id) or (
        SlurmJob(job_id, FORGOTTEN) if job_id in denied else SlurmJob(job_id, UNKNOWN, silence)) for job_id in job_ids}


def wait(job_ids: Collection[str], pause: Callable[[dict[str, SlurmJob], float], None],
         ask: Runner = patient) -> dict[str, SlurmJob]:
    """Poll the jobs until all have ended. Return the last states. ``pause``: called with (jobs, seconds) between two polls;
    returns after that many seconds, or earlier if the run directory shows news."""
    for delay in itertools.chain(DELAYS_S, itertools.repeat(DELAYS_S[-1])):
        states = job_states(job_ids, ask)
        if all(job.ended for job in states.values()):
            break
        pause(states, delay)
    return states


def script_of(job_id: str, ask: Runner = patient) -> Path | None:
    """Return the job script that sbatch was given, while Slurm knows the job; None if it does not report it."""
    try:
        match = re.search(r" Command=(/.*?) WorkDir=", ask(("scontrol", "show", "job", "--oneliner", job_id)))
    except CommandFailed:
        return None
    return Path(match[1]) if match else None


def release(job_id: str, ask: Runner = patient) -> None:
    """Let Slurm start a held job again. Raises CommandFailed."""
    ask(("scontrol", "release", job_id))


def largest_task(step_id: str, ask: Runner = ask) -> int | None:
    """Return the task of a step (``7.0``) that used the most memory, from Slurm's accounting; None without accounting."""
    try:
        task = ask(("sacct", "--noheader", "--parsable2", f"--jobs={step_id}", "--format=MaxRSSTask")).strip()
    except CommandFailed:
        return None
    return int(task) if task.isdigit() else None


# --- the programs -----------------------------------------------------------------------------------------------------


def _squeue(job_ids: Collection[str], ask: Runner) -> list[SlurmJob]:
    """Query squeue as lines, which it filters; its JSON is 5 kB for every job of the whole cluster on 22.05."""
    answer = ask(("squeue", "--states=all", f"--jobs={','.join(job_ids)}", "--noheader", f"--Format={LINE}"))
    try:
        return parse_lines(answer)
    except ValueError as error:
        raise CommandFailed(str(error)) from None


def _scontrol(job_ids: Iterable[str], ask: Runner) -> list[SlurmJob]:
    """Query scontrol once per job, because it takes no list."""
    records, silent = [], None
    for job_id in job_ids:
        try:
            records += parse_scontrol(ask(("scontrol", "show", "job", "--oneliner", job_id)))
        except CommandFailed as error:
            silent = error
    if silent and not records:
        raise silent
    return records


def _sacct(job_ids: Collection[str], ask: Runner) -> list[SlurmJob]:
    """Query sacct for jobs that have ended; its other states may be wrong if the controller does not know the job."""
    answer = ask(("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(job_ids)}", f"--format={RECORD}"))
    return [job for job in parse_sacct(answer) if job.ended]


# --- arrays and heterogeneous jobs ------------------------------------------------------------------------------------


def _is_part(job_id: str, requested: str) -> bool:
    """Return True if ``7_2``, ``7_[0-5%2]`` or ``7+1`` is the requested job, or a part of it."""
    if job_id == requested or re.split(r"[_+]", job_id)[0] == requested:
        return True
    array, bracket, waiting = job_id.partition("_[")
    return bool(bracket) and requested in (f"{array}_{task}" for task in _tasks(waiting.rstrip("]")))


def _tasks(text: str) -> Iterator[int]:
    """Yield the tasks of ``0-4,7,10-20:5%2``."""
    for first, last, step in re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", text.partition("%")[0]):
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def _whole(job_id: str, parts: list[SlurmJob]) -> SlurmJob:
    """Return the whole job with the state of one part: a running part before waiting, then failed, then completed ones."""
    def weight(part: SlurmJob) -> int:
        return 0 if not part.ended and not part.waits else 1 if part.waits else 2 if part.state != "COMPLETED" else 3

    if len(parts) == 1:
        return parts[0] if parts[0].id == job_id else replace(parts[0], id=job_id, parts=tuple(parts))
    first = min(parts, key=weight)
    nodes = dict.fromkeys(node for part in parts if weight(part) == weight(first) for node in part.nodes)
    return replace(first, id=job_id, nodes=tuple(nodes), restarts=max(part.restarts for part in parts),
                   parts=tuple(sorted(parts, key=lambda part: part.id)))
