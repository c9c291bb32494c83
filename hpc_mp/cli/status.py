"""``hpc-mp status``: the state of a run, and why it waits or failed; without a name a list of all runs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import ago, data_size, duration, escaped, loss_number, loss_words
from hpc_mp.cli.follow import follow
from hpc_mp.cluster.slurm.job import UNKNOWN, SlurmJob
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.job.sweep import words_of
from hpc_mp.launch.find import find_all, job_of, listing, runs_below
from hpc_mp.launch.status import RunStatus, go_on, listed, overview
from hpc_mp.launch.sweep import best_runs
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.checkpoints import step_of
from hpc_mp.rundir.usage import launched, size

COLUMNS = ("run", "state", "job", "step", "loss", "launched", "node h", "size")
RIGHT = frozenset({"step", "loss", "node h", "size"})  # columns of numbers


@click.command(help="Show what a run is doing, why it waits or failed, and how far it is. RUN is a run directory, DIRECTORY/NAME "
                    "for the newest run of a job, or the id of a Slurm job; without it, or with a directory of several jobs, "
                    "all runs are listed, the newest first.")
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--follow", "following", is_flag=True,
              help="Go on until all of them have ended; exit 1 when one of them did not complete. Without a terminal a line is "
                   "printed when something has changed, and every 30 s.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; with --follow at the end.")
def command(run: Path | None, following: bool, as_json: bool) -> int:
    runs, single = _meant(run)

    def poll() -> list[RunStatus]:
        return [overview(runs[0])] if single else listed(runs)

    seen = follow(poll, single_text if single else table, one_line, quiet=as_json) if following else poll()
    if as_json:
        documents = [_document(each, whole=single) for each in seen]
        click.echo(json.dumps(documents[0] if single else {"runs": documents}))
    elif not following:
        click.echo(single_text(seen) if single else table(seen))
    return int(following and any(each.state != "completed" for each in seen))


def _meant(run: Path | None) -> tuple[list[RunDirectory], bool]:
    """Return the runs, the newest first, and True if a single run was selected, rather than a list."""
    directories = listing(run)
    if directories is None and run is not None:
        found = find_all(run)
        return found, len(found) == 1
    listed = list(runs_below(directories or ()))
    if not listed:
        where = ", ".join(map(str, directories or ()))
        raise HpcMpError("status", f"finds no run below {where}",
                         "call it in the directory of the job file, or name a run or the directory of the runs (job.directory)")
    return sorted(listed, key=lambda each: (launched(each), each.path), reverse=True), False


def _document(seen: RunStatus, *, whole: bool) -> dict[str, Any]:
    document = seen.document() | {"bytes": size(seen.run), "age": max(0.0, time.time() - launched(RunDirectory(seen.run))),
                                  "job_id": job_of(RunDirectory(seen.run))}
    return document if whole else {key: value for key, value in document.items() if key != "plan"}


def single_text(seen: Sequence[RunStatus]) -> str:
    return escaped("\n".join(f"{name:<9} {text}" for name, text in lines(seen[0])))


def table(seen: Sequence[RunStatus]) -> str:
    """Return a line per run; its values in a sweep are at the end, with a mark on the best run of a sweep."""
    best = best_runs(seen)
    rows = [dict(zip(COLUMNS, COLUMNS, strict=True)), *map(_row, seen)]
    widths = {name: max(len(row[name]) for row in rows) for name in COLUMNS}
    texts = ("  ".join(row[name].rjust(widths[name]) if name in RIGHT else row[name].ljust(widths[name]) for name in COLUMNS)
             for row in rows)
    beside = ["", *(_sweep_words(each, best.get(each.run)) for each in seen)]
    return escaped("\n".join(f"{text}  {more}".rstrip() for text, more in zip(texts, beside, strict=True)))


def _row(seen: RunStatus) -> dict[str, str]:
    used, steps = seen.usage, f"{seen.step}/{seen.steps}" if seen.steps else str(seen.step or "–")
    cells = (_shown(seen.run), seen.state, job_of(RunDirectory(seen.run)) or "–", steps,
             "–" if seen.loss is None else loss_number(seen.loss), _age(seen),
             "–" if used is None else f"{used.node_hours:.2f}", data_size(size(seen.run)))
    return dict(zip(COLUMNS, cells, strict=True))


def _age(seen: RunStatus) -> str:
    return ago(time.time() - launched(RunDirectory(seen.run)))


def _shown(run: Path) -> str:
    """Return the shortest path of a run that a command accepts in the current directory."""
    return str(run.relative_to(Path.cwd())) if run.is_relative_to(Path.cwd()) else str(run)


def _sweep_words(seen: RunStatus, best: str | None) -> str:
    values = "" if seen.sweep is None else words_of(seen.sweep.values) or "the job file as it is"
    return values if best is None else f"{values}  ← best by {best}"


def one_line(seen: RunStatus) -> str:
    """Return the line that is printed for a followed run without a terminal."""
    job = seen.job
    waits = f" ({job.reason}{': ' + job.meaning if job.meaning else ''})" if job is not None and job.waits and job.reason else ""
    cause = f": {seen.cause}" if seen.cause is not None else ""
    step = f", step {steps_words(seen)}" if seen.step else ""
    return escaped(f"{_shown(seen.run)} {seen.state}{_doing(seen)}{waits}{step}{cause}")


def _doing(seen: RunStatus) -> str:
    """Return the ranks' activity; for a program only whether they run."""
    return f", {seen.phase}" if seen.state == "running" and seen.phase not in (None, "", seen.state) else ""


def lines(seen: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield (name, text), the most important first and the cause of a failure last."""
    again = f" (attempt {seen.attempt})" if seen.attempt > 1 else ""
    yield "run", f"{seen.run}{again}"
    if seen.sweep is not None:
        values = words_of(seen.sweep.values) or "the job file as it is"
        yield "sweep", f"run {seen.sweep.number + 1} of {seen.sweep.of}: {values}"
    yield "state", seen.state + _doing(seen)
    if seen.before is not None:
        yield "before", seen.before
    if seen.job is not None:
        yield "job", _job(seen.job)
        if seen.job.state == UNKNOWN:
            why = f" ({seen.job.reason})" if seen.job.reason else ""
            yield "slurm", f"does not answer{why}: `scontrol ping` tells when it does again"
        if seen.job.waits and seen.job.reason:
            yield "waits", f"{seen.job.reason}: {seen.job.meaning}" if seen.job.meaning else seen.job.reason
            if seen.job.remedy:
                yield "remedy", seen.job.remedy
        for part in seen.job.parts:
            yield "", _job(part)
    for number, bad in enumerate(seen.excluded):
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(bad.time))
        yield "" if number else "without", f"{bad.node}, excluded by hpc-mp since {since}: {bad.evidence or bad.code}"
    if seen.step:
        yield "step", steps_words(seen)
    if seen.evaluation is not None:
        yield "held out", f"after step {seen.evaluation.step}: {loss_words(seen.evaluation.loss)}"
    if seen.checkpoint is not None:
        unsaved = seen.step - step_of(seen.checkpoint)
        lost = f" ({lost_words(unsaved)})" if seen.ended and unsaved > 0 else ""
        yield "saved", f"{seen.checkpoint}{lost}"
    elif seen.ended and seen.step and seen.steps:  # nobody knows what a program has saved
        yield "saved", f"nothing: {lost_words(seen.step)}"
    if seen.best is not None:
        yield "best", f"{seen.best.path}, held out {loss_words(seen.best.loss)}"
    if seen.usage is not None and (words := seen.usage.words()):
        yield "used", words
    if seen.successors:
        yield "then", ", ".join(f"{job.id} {job.state}" for job in seen.successors)
    if seen.cause is not None:
        yield "logs", shlex.join(["hpc-mp", "logs", str(seen.run)])
    if seen.state in ("failed", "stopped"):
        yield "go on", go_on(RunDirectory(seen.run))
    if seen.cause is not None:
        yield "cause", seen.cause


def lost_words(steps: int) -> str:
    """Return the number of lost steps in words: ``13 steps are lost``."""
    return f"{steps:,} step{'s are' if steps > 1 else ' is'} lost"


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


def steps_words(seen: RunStatus) -> str:
    """Return the steps in words: ``2/5, loss 7.0000, 50 tokens/s, the last 3 s ago, about 6 s left``."""
    words = f"{seen.step}/{seen.steps}" if seen.steps else f"{seen.step}"
    if seen.loss is not None:
        words += f", loss {loss_number(seen.loss)}"
    if seen.tokens_per_s is not None:
        words += f", {seen.tokens_per_s:,.0f} tokens/s"
    if seen.step_age is not None and seen.state == "running":
        words += f", the last {ago(seen.step_age)}" + (": the next one is late" if seen.late else "")
    return words + (f", about {duration(seen.eta)} left" if seen.eta else "")
