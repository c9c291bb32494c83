"""``hpc-mp logs``: the output of a run; after a failure the cause comes last."""

from __future__ import annotations

import time
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import escaped
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.job import SlurmJob
from hpc_mp.diagnosis.cause import cause
from hpc_mp.launch.find import find
from hpc_mp.launch.logs import Follower, Logs
from hpc_mp.launch.status import job_ids, seen
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.failures import read_failures

POLL_S = 0.5  # between two polls of the files


@click.command(help="Show what a run has said; after a failure the cause comes last.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--rank", type=int, help="The log of one rank.")
@click.option("--node", help="The log of one node, by its name.")
@click.option("--attempt", type=int, help="An earlier attempt, from 1; default: the newest.")
@click.option("--follow", is_flag=True, help="Go on until the run has ended.")
def command(run: Path, rank: int | None, node: str | None, attempt: int | None, follow: bool) -> None:
    if rank is not None and node is not None:
        raise HpcMpError("--rank and --node", "exclude each other", "give one of them")
    found = find(run)
    follower, jobs, delays = Follower(), _jobs(found), iter(queue.DELAYS_S)
    due = time.monotonic() + next(delays)
    said = ""
    while True:
        if attempt is None and (words := _waits(jobs)) != said:
            said = words
            click.echo(words or "it waits no longer")
        ended = not follow or attempt is not None or seen(found, jobs).ended
        logs = Logs(found, attempt)
        sources = logs.rank(rank) if rank is not None else logs.node(node) if node is not None else logs.main()
        for line in follower.new(sources):
            click.echo(escaped(line))
        if ended:
            break
        time.sleep(POLL_S)
        if jobs and time.monotonic() > due:
            jobs, due = _jobs(found), time.monotonic() + next(delays, queue.DELAYS_S[-1])
    if not sources and (rank is not None or node is not None):
        given, key = (f"--rank {rank}", "rank") if rank is not None else (f"--node {node}", "node")
        raise HpcMpError(given, f"has no log; attempt {logs.attempt} has started {key}s {logs.named(key)}",
                         "name one of those, or another --attempt")
    _cause(found, logs.attempt, jobs)


def _jobs(run: RunDirectory) -> list[SlurmJob]:
    ids = job_ids(run)
    return list(queue.job_states(ids).values()) if ids else []


def _waits(jobs: list[SlurmJob]) -> str:
    """Return the reason why no output appears, or no more; empty for a run that does not wait."""
    job = next((job for job in jobs if not job.ended), None)
    if job is None or not job.waits:
        return ""
    reason = ": ".join(filter(None, (job.reason, job.meaning)))
    remedy = f". {job.remedy}" if job.remedy else ""
    return f"job {job.id} waits in the queue{f' ({reason})' if reason else ''}{remedy}"


def _cause(run: RunDirectory, attempt: int, jobs: list[SlurmJob]) -> None:
    """Print the cause of a failure, after the traceback of its rank. The last line states the rank, its host and the failure."""
    now = seen(run, jobs)
    if attempt == now.attempt and now.state != "failed":
        return
    found = cause(run, attempt)
    said = found.message if found else now.cause if attempt == now.attempt else None
    traceback = next((each.traceback for each in read_failures(run, attempt) if found and each.rank == found.rank), "")
    for text in filter(None, (traceback, said)):
        click.echo(f"\n{escaped(text.rstrip())}")
