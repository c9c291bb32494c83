"""``hpc-mp launch``: plan, place, render and start a job."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click

from hpc_mp.data import find_files, find_tokenizer
from hpc_mp.errors import RunFailed
from hpc_mp.job import load_job
from hpc_mp.launch.compose import Plan, compose
from hpc_mp.launch.describe import describe
from hpc_mp.launch.local import launch_local
from hpc_mp.launch.model_check import check_model
from hpc_mp.launch.outcome import Outcome, finished
from hpc_mp.launch.resume import Resumed, resuming
from hpc_mp.launch.slurm_run import launch_job, launch_step
from hpc_mp.launch.where import decide
from hpc_mp.launch.write import next_run, script
from hpc_mp.models import read_config
from hpc_mp.rundir import RunDirectory


@click.command(help="Plan, place, render and start a job.")
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--on", type=click.Choice(["auto", "slurm", "local", "mpi"]), default="auto", show_default=True,
              help="Slurm, or emulated nodes on this machine; auto says which it takes and why.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: --set train.steps=20.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the job script; start and write nothing.")
@click.option("--explain", is_flag=True, help="Like --dry-run, with the reason for every line.")
@click.option("--wait", is_flag=True, help="Wait for the end of a Slurm job (all others are always waited for).")
@click.option("--resume", is_flag=True, help="Go on with the newest run of this job, on this or another layout.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON document on stdout; all else goes to stderr.")
def command(
    job: Path, on: str, overrides: tuple[str, ...], dry_run: bool, explain: bool, wait: bool, resume: bool,
    as_json: bool,
) -> int:
    def say(text: str) -> None:
        click.echo(text, err=as_json or dry_run or explain)

    given = load_job(job, overrides)
    find_files(given.data.files)
    find_tokenizer(given=Path(given.data.tokenizer) if given.data.tokenizer else None, pretrained=None)
    plan = compose(given, decide(on))

    def check() -> None:
        warnings = check_model(read_config(given), plan.shape.vocabulary, written_here=given.model.config is not None)
        for text in warnings:
            click.echo(f"warning: {text}", err=True)

    with ExitStack() as stack:
        resumed = stack.enter_context(resuming(plan.spec)) if resume else None
        if dry_run or explain:
            check()
        say(describe(plan))
        if dry_run or explain:
            _print_script(plan, resumed, explain, as_json)
            return 0
        if resumed is not None and not resumed.left:
            say(f"nothing is left to do: the run has its {plan.spec.train.steps} steps and their checkpoint")
            outcome = finished(resumed.run)
        else:
            outcome = _start(plan, resumed, wait, check, say)

    report = _report(outcome)
    if as_json:
        click.echo(json.dumps(outcome.document(report)))
    again = shlex.join(["hpc-mp", "launch", str(job), *(["--on", on] if on != "auto" else []),
                        *(f"--set={_shown(text)}" for text in overrides), "--resume"])
    return _conclude(outcome, report, again, say)


def _shown(override: str) -> str:
    """An override as output may show it: variables may be passwords."""
    key, _, _ = override.partition("=")
    return f"{key}=…" if key.strip().startswith("environment") else override


def _start(
    plan: Plan, resumed: Resumed | None, wait: bool, check: Callable[[], None], say: Callable[[str], None]
) -> Outcome:
    if plan.where.place == "local":
        return launch_local(plan, resumed, check, say)
    check()
    if plan.where.place == "step":
        return launch_step(plan, resumed, os.environ["SLURM_JOB_ID"], say)
    return launch_job(plan, resumed, wait, say)


def _print_script(plan: Plan, resumed: Resumed | None, explain: bool, as_json: bool) -> None:
    run = resumed.run.path if resumed else next_run(plan.spec)
    rendered = script(plan, run)
    if as_json:
        click.echo(json.dumps({"run": str(run), "state": "planned", "job_id": None, "where": plan.where.place,
                               "script": rendered.text, "explanations": rendered.explanations}))
    elif explain:
        for line, why in rendered.explanations:
            click.echo(f"{line}\n    {why}")
    else:
        click.echo(rendered.text, nl=False)


def _report(outcome: Outcome) -> Path | None:
    """The pictures of a run that has trained; a run is no worse for lack of them."""
    if outcome.state == "submitted" or not outcome.steps:
        return None
    try:
        from hpc_mp.report import write_report

        return write_report(RunDirectory(outcome.run))
    except Exception as error:
        click.echo(f"warning: no report ({type(error).__name__}: {error})", err=True)
        return None


def _conclude(outcome: Outcome, report: Path | None, again: str, say: Callable[[str], None]) -> int:
    """Say how it went; the exit code."""
    if outcome.loss is not None and outcome.first_loss is not None:
        speed = f", {outcome.tokens_per_s:,.0f} tokens/s" if outcome.tokens_per_s else ""
        say(f"loss      {outcome.first_loss:.4f} → {outcome.loss:.4f} in {outcome.steps} steps{speed}")
    if outcome.checkpoint is not None:
        say(f"saved     {outcome.checkpoint}")
    if report is not None:
        say(f"report    {report}")
    cause = outcome.cause
    if outcome.state == "completed":
        say(f"export    {shlex.join(['hpc-mp', 'export', str(outcome.run), '--output'])} DIRECTORY")
    if outcome.state == "stopped":
        raise RunFailed(f"stopped after step {outcome.steps}. Go on with: {again}")
    if cause is not None and cause.kind == "user":
        click.echo(f"hpc-mp: {cause.message}", err=True)
        return 2
    if cause is not None:
        log = f"its log:    {cause.log}\n" if cause.log else ""
        raise RunFailed(f"{cause.message}\n{log}go on with: {again}")
    return 0
