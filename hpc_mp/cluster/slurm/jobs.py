"""States of jobs: one query for all of them, for any release of Slurm, with or without accounting.

``squeue`` is asked first, then ``scontrol`` for the jobs that squeue does not list, then ``sacct``. Each may be absent.
"""

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.job import FORGOTTEN, LINE, RECORD, UNKNOWN, SlurmJob, parse_lines, parse_sacct, parse_scontrol
from hpc_mp.cluster.slurm.query import last_line

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
