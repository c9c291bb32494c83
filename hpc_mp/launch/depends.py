"""``slurm.depends``: what must have come before a job starts, as Slurm's ``--dependency`` says it.

A run is looked up in its directory. One that goes on has a Slurm job, and with ``slurm.chain`` several: whichever of them
completes the run ends with exit code 0, the others do not (they are withdrawn, or end otherwise), so that any of them will do.
A restart keeps the job's id.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.command import Runner
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.job import FORGOTTEN, SlurmJob
from hpc_mp.job import AnySpec
from hpc_mp.job.values import DEPENDENCY, JOB_ID
from hpc_mp.launch.status import RunStatus, overview
from hpc_mp.rundir import find_run

# Of each kind, ends by which it holds already, and what an end is called by which it never will.
HOLDS = {"afterok": ("completed",), "afterany": ("completed", "failed", "stopped"), "afternotok": ("failed", "stopped")}


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What a job waits for.

    Attributes:
        option: of ``--dependency``; None where there is nothing to wait for.
        words: one line for each that was named.
    """

    option: str | None
    words: tuple[str, ...]


NONE = Dependencies(None, ())


def dependencies(spec: AnySpec, ask: Runner = queue.patient) -> Dependencies:
    """What the runs and jobs of ``slurm.depends`` are, and what is still to be waited for.

    Raises:
        HpcMpError: a run or a job that there is not, or that has ended so that the dependency can never be satisfied; several
            dependencies of which one is a run with ``slurm.chain``, which Slurm cannot say.
    """
    found = [_one(word, ask) for word in spec.slurm.depends]
    terms = [term for term, _ in found if term is not None]
    if len(terms) > 1 and any("?" in term for term in terms):
        raise HpcMpError(f"slurm.depends = {list(spec.slurm.depends)}", "names a run with slurm.chain beside others, and Slurm "
                         "joins its dependencies either by “and” or by “or”", "depend on the run that ends last alone")
    return Dependencies(",".join(terms) or None, tuple(words for _, words in found))


def _one(word: str, ask: Runner) -> tuple[str | None, str]:
    """The term of ``--dependency`` and the words for one dependency."""
    found = DEPENDENCY.fullmatch(word)
    assert found is not None  # a value of the job file is one line
    kind, name = found[1] or "afterok", found[2]
    if JOB_ID.fullmatch(name):
        return _job(word, kind, queue.job_states([name], ask)[name])
    try:
        run = find_run(Path(name))
    except HpcMpError as error:
        raise HpcMpError(f"slurm.depends: {word}", error.rule, f"{error.remedy}; or name the id of a Slurm job") from None
    now = overview(run, ask)
    if now.ended:
        return _ended(word, kind, now.state, shlex.join(["hpc-mp", "launch", str(run.job), "--resume"]))
    if now.job is None:
        raise HpcMpError(f"slurm.depends: {word}", f"is {run.path}, which is no job of Slurm but runs on emulated nodes",
                         "launch this one when it has ended")
    ids = list(_ids(now))
    return "?".join(f"{kind}:{job_id}" for job_id in ids), f"{kind}: {run.path}, {now.state} as job {' or '.join(ids)}"


def _ids(now: RunStatus) -> Iterator[str]:
    assert now.job is not None
    yield now.job.id
    yield from (job.id for job in now.successors)


def _job(word: str, kind: str, job: SlurmJob) -> tuple[str | None, str]:
    if job.state == FORGOTTEN:
        raise HpcMpError(f"slurm.depends: {word}", "is a job that Slurm does not know, or no longer",
                         "name the run's directory, or a job that squeue lists")
    if job.ended:
        state = "completed" if job.state == "COMPLETED" else "failed"
        return _ended(word, kind, state, "launch it again", f"job {job.id} has ended as {job.state}")
    return f"{kind}:{job.id}", f"{kind}: job {job.id}, {job.state}"


def _ended(word: str, kind: str, state: str, remedy: str, said: str | None = None) -> tuple[None, str]:
    """Nothing is left to wait for. Raises HpcMpError where the wait would never end."""
    words = said or f"the run has {state}"
    if state not in HOLDS[kind]:
        otherwise = f'or write "afterany:{word.removeprefix(kind + ":")}" to start all the same'
        raise HpcMpError(f"slurm.depends: {word}", f"can never be satisfied: {words}",
                         f"{remedy}, {otherwise}" if kind == "afterok" else "leave it out")
    return None, f"{word}: {words}, nothing to wait for"


def row(found: Dependencies) -> Sequence[str]:
    """For the summary of a launch."""
    return [f"depends   {words}" for words in found.words]
