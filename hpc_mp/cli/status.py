"""``hpc-mp status``: what a run is doing, and why it waits or failed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import click

from hpc_mp.base.text import ago, duration, loss_words
from hpc_mp.cluster.slurm.job import SlurmJob
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.launch.status import RunStatus, overview
from hpc_mp.rundir import find_run


@click.command(help="Show what a run is doing, why it waits or failed, and how far it is.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, as_json: bool) -> None:
    seen = overview(find_run(run))
    if as_json:
        click.echo(json.dumps(seen.document()))
        return
    for name, text in lines(seen):
        click.echo(f"{name:<9} {text}")


def lines(seen: RunStatus) -> Iterator[tuple[str, str]]:
    """(what, in words), the most important first and the cause of a failure last."""
    again = f" (attempt {seen.attempt})" if seen.attempt > 1 else ""
    yield "run", f"{seen.run}{again}"
    yield "state", seen.state + (f", {seen.phase}" if seen.state == "running" and seen.phase else "")
    if seen.job is not None:
        yield "job", _job(seen.job)
        if seen.job.waits and seen.job.reason:
            yield "waits", f"{seen.job.reason}: {seen.job.meaning}" if seen.job.meaning else seen.job.reason
            if seen.job.remedy:
                yield "remedy", seen.job.remedy
        for part in seen.job.parts:
            yield "", _job(part)
    for number, bad in enumerate(seen.excluded):
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(bad.time))
        yield "" if number else "without", f"{bad.node}, excluded by hpc-mp since {since}: {bad.code} ({bad.evidence})"
    if seen.step:
        yield "step", _steps(seen)
    if seen.evaluation is not None:
        yield "held out", f"after step {seen.evaluation.step}: {loss_words(seen.evaluation.loss)}"
    if seen.checkpoint is not None:
        yield "saved", str(seen.checkpoint)
    if seen.successors:
        yield "then", ", ".join(f"{job.id} {job.state}" for job in seen.successors)
    if seen.cause is not None:
        yield "cause", seen.cause


def _job(job: SlurmJob) -> str:
    words = f"{job.id} {job.state}"
    if job.start is not None:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.start))
        words += f", {'expected to start' if job.waits else 'started'} {clock}"
    if job.nodes:
        words += f" on {compress(job.nodes)}"
    if job.restarts:
        words += f", started again {job.restarts} times" if job.restarts > 1 else ", started again once"
    return words + (f", exit code {job.exit_code}" if job.exit_code else "")


def _steps(seen: RunStatus) -> str:
    words = f"{seen.step}/{seen.steps}"
    if seen.loss is not None:
        words += f", loss {seen.loss:.4f}"
    if seen.tokens_per_s is not None:
        words += f", {seen.tokens_per_s:,.0f} tokens/s"
    if seen.step_age is not None and seen.state == "running":
        words += f", the last {ago(seen.step_age)}"
    return words + (f", about {duration(seen.eta)} left" if seen.eta else "")
