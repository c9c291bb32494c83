"""``hpc-mp launch``: plan, place, render and start a job."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.cluster.slurm.inside import decide
from hpc_mp.cluster.slurm.releases import Version, parse_version
from hpc_mp.job import load_array
from hpc_mp.launch.backends.local import launch_local
from hpc_mp.launch.backends.mpi import launch_mpi
from hpc_mp.launch.backends.slurm import launch_array, launch_job, launch_step
from hpc_mp.launch.model_check import check_model
from hpc_mp.launch.plan import Plan, compose
from hpc_mp.launch.render import check_array, find_template, site_defaults
from hpc_mp.launch.resume import Resumed, resuming
from hpc_mp.launch.run_files import next_run, script
from hpc_mp.launch.summary import describe
from hpc_mp.layout.models import read_config
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.outcome import Outcome, finished
from hpc_mp.train.data import find_files, find_tokenizer

STATES = ("completed", "submitted", "stopped", "failed")  # of an array's elements the worst is that of all


@click.command(help="Plan, place, render and start a job.")
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--on", type=click.Choice(["auto", "slurm", "local", "mpi"]), default="auto", show_default=True,
              help="Slurm, or emulated nodes on this machine; auto says which it takes and why.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: --set train.steps=20.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the job script; start and write nothing.")
@click.option("--explain", is_flag=True, help="Like --dry-run, with the reason for every line.")
@click.option("--wait", is_flag=True, help="Wait for the end of a Slurm job (all others are always waited for).")
@click.option("--resume", is_flag=True, help="Go on with the newest run of this job, on this or another layout.")
@click.option("--slurm-version", metavar="YEAR.MONTH", callback=lambda _context, _option, text: text and parse_version(text),
              help="Write the job script for this release of Slurm instead of the one found.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON document on stdout; all else goes to stderr.")
def command(
    job: Path, on: str, overrides: tuple[str, ...], dry_run: bool, explain: bool, wait: bool, resume: bool,
    slurm_version: Version | None, as_json: bool,
) -> int:
    def say(text: str) -> None:
        click.echo(text, err=as_json or dry_run or explain)

    project = job.absolute().parent
    elements = load_array(job, overrides, site_defaults(project))
    where, template = decide(on), find_template(project)
    if where.place != "slurm":
        elements = elements[:1]
    plans = tuple(replace(compose(given, where, slurm_version), template=template) for given in elements)
    check_array([plan.spec for plan in plans])
    given, plan = elements[0], plans[0]
    find_files(given.data.files)
    find_tokenizer(given=Path(given.data.tokenizer) if given.data.tokenizer else None, pretrained=None)

    def check() -> None:
        for given, plan in zip(elements, plans, strict=True):
            warnings = check_model(read_config(given), plan.shape.vocabulary, written_here=given.model.config is not None)
            for text in warnings:
                click.echo(f"warning: {text}", err=True)

    again = shlex.join(["hpc-mp", "launch", str(job), *(["--on", on] if on != "auto" else []),
                        *(f"--set={_shown(text)}" for text in overrides), "--resume"])
    if len(plans) > 1 and not (dry_run or explain):
        if resume:
            raise HpcMpError("--resume", "goes on with one run, and slurm.array makes several",
                             "launch the element that you want to go on with as a job of its own")
        check()
        say(describe(plan))
        return _conclude_array(launch_array(plans, wait, say), again, as_json, say)
    with ExitStack() as stack:
        resumed = stack.enter_context(resuming(plan.spec)) if resume else None
        if dry_run or explain:
            check()
        say(describe(plan))
        if dry_run or explain:
            _print_script(plans, resumed, explain, as_json)
            return 0
        if resumed is not None and not resumed.left:
            say(f"nothing is left to do: the run has its {plan.spec.train.steps} steps and their checkpoint")
            outcome = finished(resumed.run)
        else:
            outcome = _start(plan, resumed, wait, check, say)

    report = _report(outcome)
    if as_json:
        click.echo(json.dumps(outcome.document(report)))
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
    if plan.where.place == "mpi":
        return launch_mpi(plan, resumed, say)
    if plan.where.place == "step":
        return launch_step(plan, resumed, os.environ["SLURM_JOB_ID"], say)
    return launch_job(plan, resumed, wait, say)


def _print_script(plans: Sequence[Plan], resumed: Resumed | None, explain: bool, as_json: bool) -> None:
    plan = plans[0]
    run = resumed.run.path if resumed else next_run(plan.spec)
    rendered = script(plan, run, *(run.with_name(f"{int(run.name) + number:04d}") for number in range(1, len(plans))))
    if as_json:
        click.echo(json.dumps({"run": str(run), "state": "planned", "job_id": None, "where": plan.where.place,
                               "template": rendered.template, "script": rendered.text, "explanations": rendered.explanations}))
    elif explain:
        click.echo(f"# template: {rendered.template}")
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


def _conclude_array(outcomes: Sequence[Outcome], again: str, as_json: bool, say: Callable[[str], None]) -> int:
    """Say how every element went; the worst exit code."""
    reports = [_report(outcome) for outcome in outcomes]
    if as_json:
        documents = [outcome.document(report) for outcome, report in zip(outcomes, reports, strict=True)]
        worst = max(documents, key=lambda document: STATES.index(document["state"]))
        click.echo(json.dumps(worst | {"elements": documents}))
    code = 0
    for outcome, report in zip(outcomes, reports, strict=True):
        try:
            code = max(code, _conclude(outcome, report, again, say))
        except RunFailed as failed:
            click.echo(f"hpc-mp: {outcome.run}: {failed}", err=True)
            code = 1
    return code


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
