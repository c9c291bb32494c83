"""``hpc-mp logs``: the output of a run, with the cause of a failure at the end."""

import time
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import escaped
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.jobs import SlurmJob
from hpc_mp.diagnosis.cause import cause
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.failures import read_failures
from hpc_mp.runs.find import find
from hpc_mp.runs.logs import Follower, Logs
from hpc_mp.runs.status import described, seen

POLL_S = 0.5  # between two polls of the files


@click.command(help="Show the output of a run, with the cause of a failure at the end.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--rank", type=int, help="The log of one rank.")
@click.option("--node", help="The log of one node, by its name.")
@click.option("--attempt", type=int, help="An earlier attempt, from 1; default: the newest.")
@click.option("--follow", is_flag=True, help="Continue until the run has ended.")
def command(run: Path, rank: int | None, node: str | None, attempt: int | None, follow: bool) -> None:
    if rank is not None and node is not None:
        raise HpcMpError("--rank and --node", "exclude each other", "remove one of them")
    directory = find(run)
    follower, jobs, delays = Follower(), described([directory])[0], iter(queue.DELAYS_S)
    due = time.monotonic() + next(delays)
    last_reason = ""
    while True:
        if attempt is None and (reason := _waits(jobs)) != last_reason:
            last_reason = reason
            click.echo(reason or "the job no longer waits")
        ended = not follow or attempt is not None or seen(directory, jobs).ended
        logs = Logs(directory, attempt)
        sources = logs.rank(rank) if rank is not None else logs.node(node) if node is not None else logs.main()
        for line in follower.new(sources):
            click.echo(escaped(line))
        if ended:
            break
        time.sleep(POLL_S)
        if jobs and time.monotonic() > due:
            jobs, due = described([directory])[0], time.monotonic() + next(delays, queue.DELAYS_S[-1])
    if not sources and (rank is not None or node is not None):
        option, key = (f"--rank {rank}", "rank") if rank is not None else (f"--node {node}", "node")
        raise HpcMpError(option, f"has no log; attempt {logs.attempt} has started {key}s {logs.named(key)}",
                         "pass one of these, or another --attempt")
    _cause(directory, logs.attempt, jobs)


def _waits(jobs: list[SlurmJob]) -> str:
    """Return the reason for missing output; empty for a run that does not wait."""
    job = next((job for job in jobs if not job.ended), None)
    if job is None or not job.waits:
        return ""
    reason = ": ".join(filter(None, (job.reason, job.meaning)))
    remedy = f". {job.remedy}" if job.remedy else ""
    return f"job {job.id} waits in the queue{f' ({reason})' if reason else ''}{remedy}"


def _cause(run: RunDirectory, attempt: int, jobs: list[SlurmJob]) -> None:
    """Print the cause of a failure, after the traceback of its rank. The last line states the rank, its host and the failure."""
    status = seen(run, jobs)
    if attempt == status.attempt and status.state != "failed":
        return
    failure = cause(run, attempt)
    message = failure.message if failure else status.cause if attempt == status.attempt else None
    traceback = next((record.traceback for record in read_failures(run, attempt) if failure and record.rank == failure.rank), "")
    for text in filter(None, (traceback, message)):
        click.echo(f"\n{escaped(text.rstrip())}")
