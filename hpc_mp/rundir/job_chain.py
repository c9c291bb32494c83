"""A chain of jobs: those queued behind a run's job, to carry on where it stops and cannot be queued again."""

from __future__ import annotations

from hpc_mp.rundir import RunDirectory, read_json, write_json


def record_successors(run: RunDirectory, jobs: list[str]) -> None:
    """Raises OSError."""
    write_json(run.successors, jobs)


def successors(run: RunDirectory, job_id: str | None = None) -> tuple[str, ...]:
    """Ids of the jobs queued behind ``job_id``, all of them by default; the next one first."""
    try:
        jobs = tuple(map(str, read_json(run.successors)))
    except (OSError, ValueError):
        return ()
    if job_id is None:
        return jobs
    return jobs[jobs.index(job_id) + 1:] if job_id in jobs else ()
