"""``slurm.depends``: conditions for the start of a job, translated to Slurm's ``--dependency``.

A run is looked up in its directory. A run that is not over has a Slurm job, and with ``slurm.chain`` several. The job that
completes the run ends with exit code 0; the others do not (they are withdrawn, or end otherwise). So any of them may satisfy
the dependency. A restart keeps the job's id.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.command import Runner
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.jobs import FORGOTTEN, SlurmJob
from hpc_mp.job import AnySpec
from hpc_mp.job.values import DEPENDENCY, JOB_ID
from hpc_mp.rundir import find_run
from hpc_mp.runs.status import overview

# For each kind: the states of an ended run that satisfy it.
HOLDS = {"afterok": ("completed",), "afterany": ("completed", "failed", "stopped"), "afternotok": ("failed", "stopped")}


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The dependencies of a job. ``option``: value of ``--dependency``; None if there is nothing to wait for. ``words``: one line
    for each named dependency."""

    option: str | None
    words: tuple[str, ...]


NONE = Dependencies(None, ())


def dependencies(spec: AnySpec, ask: Runner = queue.patient) -> Dependencies:
    """Resolve the runs and jobs of ``slurm.depends``, and determine which are still pending. Raises HpcMpError if a run or job
    does not exist, or ended so that the dependency can never be satisfied; or several dependencies include a run with
    ``slurm.chain``, which Slurm cannot express."""
    resolved = [_dependency(word, ask) for word in spec.slurm.depends]
    terms = [term for term, _ in resolved if term is not None]
    if len(terms) > 1 and any("?" in term for term in terms):
        raise HpcMpError(f"slurm.depends = {list(spec.slurm.depends)}", "names a run with slurm.chain beside others, and Slurm "
                         "joins its dependencies either by “and” or by “or”", "depend on the run that ends last alone")
    return Dependencies(",".join(terms) or None, tuple(line for _, line in resolved))


def _dependency(word: str, ask: Runner) -> tuple[str | None, str]:
    """Return the term of ``--dependency`` and the words for one dependency."""
    match = DEPENDENCY.fullmatch(word)
    assert match is not None  # a value of the job file is one line
    kind, name = match[1] or "afterok", match[2]
    if JOB_ID.fullmatch(name):
        return _job(word, kind, queue.job_states([name], ask)[name])
    try:
        run = find_run(Path(name))
    except HpcMpError as error:
        raise HpcMpError(f"slurm.depends: {word}", error.rule, f"{error.remedy}; or name the id of a Slurm job") from None
    status = overview(run, ask)
    if status.ended:
        return _ended(word, kind, status.state, shlex.join(["hpc-mp", "launch", str(run.job), "--resume"]))
    if status.job is None:
        raise HpcMpError(f"slurm.depends: {word}", f"is {run.path}, which is no job of Slurm but runs on emulated nodes",
                         "launch this one when it has ended")
    ids = [status.job.id, *(job.id for job in status.successors)]
    return "?".join(f"{kind}:{job_id}" for job_id in ids), f"{kind}: {run.path}, {status.state} as job {' or '.join(ids)}"


def _job(word: str, kind: str, job: SlurmJob) -> tuple[str | None, str]:
    if job.state == FORGOTTEN:
        raise HpcMpError(f"slurm.depends: {word}", "is a job that Slurm does not know, or no longer",
                         "name the run's directory, or a job that squeue lists")
    if job.ended:
        state = "completed" if job.state == "COMPLETED" else "failed"
        return _ended(word, kind, state, "launch it again", f"job {job.id} has ended as {job.state}")
    return f"{kind}:{job.id}", f"{kind}: job {job.id}, {job.state}"


def _ended(word: str, kind: str, state: str, remedy: str, message: str | None = None) -> tuple[None, str]:
    """Return no term and the words for a dependency that is satisfied. Raises HpcMpError if it never can be."""
    reason = message or f"the run has {state}"
    if state not in HOLDS[kind]:
        otherwise = f'or write "afterany:{word.removeprefix(kind + ":")}" to start all the same'
        raise HpcMpError(f"slurm.depends: {word}", f"can never be satisfied: {reason}",
                         f"{remedy}, {otherwise}" if kind == "afterok" else "leave it out")
    return None, f"{word}: {reason}, nothing to wait for"
