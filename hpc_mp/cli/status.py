"""``hpc-mp status``: the state of a run, and the reason if it waits or failed; without a name a list of all runs.

With ``--follow``, runs are polled until all have ended: shown in place on a terminal, else as lines of a log.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import ago, data_size, duration, escaped, loss_number, speed
from hpc_mp.cli.output import short_path
from hpc_mp.cluster.slurm.jobs import UNKNOWN, SlurmJob
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.job.sweep import words_of
from hpc_mp.launch.fit import never_starts
from hpc_mp.launch.sweep import best_runs
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.checkpoints import step_of
from hpc_mp.rundir.usage import launched, size
from hpc_mp.runs.find import find_all, listing, runs_below
from hpc_mp.runs.keepers import job_of
from hpc_mp.runs.status import RunStatus, go_on, listed, overview

COLUMNS = ("run", "state", "job", "step", "loss", "launched", "node h", "size")
RIGHT = frozenset({"step", "loss", "node h", "size"})  # columns of numbers


@click.command(help="Show the state and the progress of a run, and the reason if it waits or failed. RUN is a run directory, "
                    "DIRECTORY/NAME for the newest run of a job, or the id of a Slurm job; without it, or with a directory of "
                    "several jobs, all runs are listed, the newest first.")
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--follow", "following", is_flag=True,
              help="Continue until all runs have ended; exit 1 if a run did not complete. Without a terminal, a line is printed "
                   "at every change, and every 30 s.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; with --follow at the end.")
def command(run: Path | None, following: bool, as_json: bool) -> int:
    runs, single = _meant(run)

    def poll() -> list[RunStatus]:
        return [overview(runs[0], explain=never_starts)] if single else listed(runs)

    statuses = follow(poll, single_text if single else table, one_line, quiet=as_json) if following else poll()
    if as_json:
        documents = [_document(status, whole=single) for status in statuses]
        click.echo(json.dumps(documents[0] if single else {"runs": documents}))
    elif not following:
        click.echo(single_text(statuses) if single else table(statuses))
    return int(following and any(status.state != "completed" for status in statuses))


def _meant(run: Path | None) -> tuple[list[RunDirectory], bool]:
    """Return the runs, the newest first, and True for a single run instead of a list."""
    directories = listing(run)
    if directories is None and run is not None:
        selected = find_all(run)
        return selected, len(selected) == 1
    listed = list(runs_below(directories or ()))
    if not listed:
        where = ", ".join(map(str, directories or ()))
        raise HpcMpError("status", f"finds no run below {where}",
                         "run it in the directory of the job file, or pass a run or the directory of the runs (job.directory)")
    return sorted(listed, key=lambda directory: (launched(directory), directory.path), reverse=True), False


def _document(status: RunStatus, *, whole: bool) -> dict[str, Any]:
    document = status.document() | {"bytes": size(status.run), "age": max(0.0, time.time() - launched(RunDirectory(status.run))),
                                  "job_id": job_of(RunDirectory(status.run))}
    return document if whole else {key: value for key, value in document.items() if key != "plan"}


def single_text(statuses: Sequence[RunStatus]) -> str:
    return escaped("\n".join(f"{name:<9} {text}" for name, text in lines(statuses[0])))


def table(statuses: Sequence[RunStatus]) -> str:
    """Return a line per run, with its values in a sweep at the end, and a mark on the best run of a sweep."""
    best = best_runs(statuses)
    rows = [dict(zip(COLUMNS, COLUMNS, strict=True)), *map(_row, statuses)]
    widths = {name: max(len(row[name]) for row in rows) for name in COLUMNS}
    texts = ("  ".join(row[name].rjust(widths[name]) if name in RIGHT else row[name].ljust(widths[name]) for name in COLUMNS)
             for row in rows)
    beside = ["", *(_sweep_words(status, best.get(status.run)) for status in statuses)]
    return escaped("\n".join(f"{text}  {more}".rstrip() for text, more in zip(texts, beside, strict=True)))


def _row(status: RunStatus) -> dict[str, str]:
    used, steps = status.usage, f"{status.step}/{status.steps}" if status.steps else str(status.step or "–")
    cells = (short_path(status.run), status.state, job_of(RunDirectory(status.run)) or "–", steps,
             "–" if status.loss is None else loss_number(status.loss), ago(time.time() - launched(RunDirectory(status.run))),
             "–" if used is None else f"{used.node_hours:.2f}", data_size(size(status.run)))
    return dict(zip(COLUMNS, cells, strict=True))


def _sweep_words(status: RunStatus, best: str | None) -> str:
    values = "" if status.sweep is None else words_of(status.sweep.values) or "the job file as it is"
    return values if best is None else f"{values}  ← best by {best}"


def one_line(status: RunStatus) -> str:
    """Return the line for a followed run without a terminal."""
    job = status.job
    waits = f" ({job.reason}{': ' + job.meaning if job.meaning else ''})" if job is not None and job.waits and job.reason else ""
    cause = f": {status.cause}" if status.cause is not None else ""
    step = f", step {steps_words(status)}" if status.step else ""
    return escaped(f"{short_path(status.run)} {status.state}{_doing(status)}{waits}{step}{cause}")


def _doing(status: RunStatus) -> str:
    """Return the ranks' activity; empty for a program."""
    return f", {status.phase}" if status.state == "running" and status.phase not in (None, "", status.state) else ""


def lines(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield (name, text), the most important first and the cause of a failure last."""
    again = f" (attempt {status.attempt})" if status.attempt > 1 else ""
    yield "run", f"{status.run}{again}"
    if status.sweep is not None:
        values = words_of(status.sweep.values) or "the job file as it is"
        yield "sweep", f"run {status.sweep.number + 1} of {status.sweep.of}: {values}"
    yield "state", status.state + _doing(status)
    if status.before is not None:
        yield "before", status.before
    if status.job is not None:
        yield "job", _job(status.job)
        if status.job.state == UNKNOWN:
            why = f" ({status.job.reason})" if status.job.reason else ""
            yield "slurm", f"does not answer{why}: check with `scontrol ping`"
        if status.job.waits and status.job.reason:
            yield "waits", f"{status.job.reason}: {status.job.meaning}" if status.job.meaning else status.job.reason
            if status.job.remedy:
                yield "remedy", status.job.remedy
        for part in status.job.parts:
            yield "", _job(part)
    for number, bad in enumerate(status.excluded):
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(bad.time))
        yield "" if number else "without", f"{bad.node}, excluded by hpc-mp since {since}: {bad.evidence or bad.code}"
    if status.step:
        yield "step", steps_words(status)
    if status.evaluation is not None:
        yield "held out", f"after step {status.evaluation.step}: {status.evaluation.words}"
    if status.checkpoint is not None:
        unsaved = status.step - step_of(status.checkpoint)
        lost = f" ({lost_words(unsaved)})" if status.ended and unsaved > 0 else ""
        yield "saved", f"{status.checkpoint}{lost}"
    elif status.ended and status.step and status.steps:  # what a program has saved is unknown
        yield "saved", f"nothing: {lost_words(status.step)}"
    if status.best is not None:
        yield "best", f"{status.best.path}, held out {status.best.evaluation.words}"
    if status.usage is not None and (usage := status.usage.words()):
        yield "used", usage
    if status.successors:
        yield "then", ", ".join(f"{job.id} {job.state}" for job in status.successors)
    if status.cause is not None:
        yield "logs", shlex.join(["hpc-mp", "logs", str(status.run)])
    if status.state in ("failed", "stopped"):
        yield "continue", go_on(RunDirectory(status.run))
    if status.cause is not None:
        yield "cause", status.cause


def lost_words(steps: int) -> str:
    """Return the number of lost steps in words: ``13 steps are lost``."""
    return f"{steps:,} step{'s are' if steps > 1 else ' is'} lost"


def _job(job: SlurmJob) -> str:
    text = f"{job.id} {job.state}"
    if job.start is not None:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.start))
        text += f", {'expected to start' if job.waits else 'started'} {clock}"
    if job.nodes:
        text += f" on {compress(job.nodes)}"
    if job.restarts:
        text += f", started again {job.restarts} times" if job.restarts > 1 else ", started again once"
    return text + (f", exit code {job.exit_code}" if job.exit_code else "")


def steps_words(status: RunStatus) -> str:
    """Return the steps in words: ``2/5, loss 7.0000, 50 tokens/s, the last 3 s ago, about 6 s left``."""
    text = f"{status.step}/{status.steps}" if status.steps else f"{status.step}"
    if status.loss is not None:
        text += f", loss {loss_number(status.loss)}"
    if status.tokens_per_s is not None:
        text += f", {speed(status.tokens_per_s, status.mfu)}"
    if status.step_age is not None and status.state == "running":
        text += f", the last {ago(status.step_age)}" + (": the next one is late" if status.late else "")
    return text + (f", about {duration(status.eta)} left" if status.eta else "")


SECONDS = (2.0, 2.0, 2.0, 5.0)  # between two polls, the last repeated: each queries Slurm once, and schedulers serve many users
SILENCE_S = 30.0  # after which a log gets a line even without a change
Poll = Callable[[], Sequence[RunStatus]]


def follow(poll: Poll, text: Callable[[Sequence[RunStatus]], str], line: Callable[[RunStatus], str], *,
           quiet: bool) -> Sequence[RunStatus]:
    """Show the results of ``poll`` until all runs have ended, and return the last ones. ``text``: formats all runs, for a
    terminal. ``line``: formats one run, for a log. ``quiet``: True for no output, because a document follows."""
    polls = _polls(poll)
    if quiet:
        *_, last = polls
        return last
    return _in_place(polls, text) if sys.stdout.isatty() else _lines(polls, line)


def _polls(poll: Poll) -> Iterator[Sequence[RunStatus]]:
    for seconds in chain(SECONDS, repeat(SECONDS[-1])):
        statuses = poll()
        yield statuses
        if not any(_goes_on(status) for status in statuses):
            return
        time.sleep(seconds)


def _goes_on(status: RunStatus) -> bool:
    return status.state in ("pending", "running", "unknown")


def _in_place(polls: Iterator[Sequence[RunStatus]], text: Callable[[Sequence[RunStatus]], str]) -> Sequence[RunStatus]:
    from rich.live import Live
    from rich.text import Text

    last: Sequence[RunStatus] = ()
    with Live(auto_refresh=False, vertical_overflow="visible") as live:
        for last in polls:
            live.update(Text(text(last)), refresh=True)
    return last


def _lines(polls: Iterator[Sequence[RunStatus]], line: Callable[[RunStatus], str]) -> Sequence[RunStatus]:
    """Print a line for each run whose state, activity or lateness has changed; not for every step."""
    last: Sequence[RunStatus] = ()
    states: dict[object, object] = {}
    before: dict[object, str | None] = {}
    last_print = 0.0
    for last in polls:
        silent = time.monotonic() - last_print >= SILENCE_S
        for status in last:
            if status.before != before.get(status.run):
                before[status.run] = status.before
                click.echo(f"{time.strftime('%H:%M:%S')} {line(status).partition(' ')[0]} before: {status.before}")
            state = (status.state, status.attempt, status.phase, status.late, status.job and status.job.reason, status.checkpoint)
            if states.get(status.run) != state or (silent and _goes_on(status)):
                states[status.run] = state
                last_print = time.monotonic()
                click.echo(f"{time.strftime('%H:%M:%S')} {line(status)}")
    return last
