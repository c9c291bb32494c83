"""``hpc-mp launch``: plan, place, render and start a job."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from hpc_mp.base.errors import RunFailed
from hpc_mp.base.text import counted, duration, loss_number, memory_size
from hpc_mp.cli.progress import TerminalListener
from hpc_mp.cli.status import lost_words
from hpc_mp.cluster.slurm.releases import Version, parse_version
from hpc_mp.job.sweep import words_of
from hpc_mp.launch.launch import ON, LaunchRequest, Preview, again, launch, preview
from hpc_mp.launch.listener import Listener
from hpc_mp.launch.summary import defaults
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.attempt import tail
from hpc_mp.rundir.checkpoints import step_of
from hpc_mp.rundir.outcome import Outcome
from hpc_mp.rundir.records import Evaluation, read_records
from hpc_mp.rundir.retention import best_evaluation
from hpc_mp.rundir.runs import best_of, read_member
from hpc_mp.runs.logs import Logs
from hpc_mp.runs.status import go_on

LAST_WORDS = 3  # last lines of a successful program
# Remedies for failures that would recur.
MEND_FIRST = {
    "memory": "reduce the memory of a rank (more parallel.microbatches, parallel.zero = 3, parallel.recompute, more ranks)",
    "space": "free disk space",
}
MEND_PROGRAM = MEND_FIRST | {"memory": "reduce the memory of a rank (a smaller batch, recomputation, more ranks)"}


@click.command(help="Plan, place, render and start a job.")
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--on", type=click.Choice(ON), default="auto", show_default=True,
              help="Slurm, or emulated nodes on this machine; auto prints its choice and the reason.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: --set train.steps=20.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the job script; start and write nothing.")
@click.option("--explain", is_flag=True, help="Like --dry-run, with the reason for every line, and all defaults.")
@click.option("--wait", is_flag=True, help="Wait for the end of a Slurm job (all others are always waited for).")
@click.option("--resume", is_flag=True,
              help="Continue the newest run of this job, or the run of this job file, on this or another layout; for a sweep on "
                   "emulated nodes, all incomplete runs.")
@click.option("--slurm-version", metavar="YEAR.MONTH", callback=lambda _context, _option, text: text and parse_version(text),
              help="Write the job script for this release of Slurm instead of the installed one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end; all other output goes to stderr.")
def command(
    job: Path, on: str, overrides: tuple[str, ...], dry_run: bool, explain: bool, wait: bool, resume: bool,
    slurm_version: Version | None, as_json: bool,
) -> int:
    request = LaunchRequest(job, on, overrides, wait, resume, slurm_version)
    listener = TerminalListener(aside=as_json or dry_run or explain)
    if dry_run or explain:
        print_preview(preview(request, listener), explain, as_json)
        return 0
    return launch_and_report(request, listener, as_json)


def launch_and_report(request: LaunchRequest, listener: Listener, as_json: bool = False) -> int:
    """Launch, print the outcome of every run, and return the exit code. Raises RunFailed if a single run failed or stopped."""
    outcome = launch(request, listener)
    if as_json:
        click.echo(json.dumps(outcome.document()))
    if outcome.state == "submitted" and not request.wait:
        watched = (outcome.job_id or "").partition("_")[0] if outcome.elements else str(outcome.run)  # all runs of a sweep
        listener.say(f"watch     {shlex.join(['hpc-mp', 'status', watched, '--follow'])}")
    if not outcome.elements:
        return _conclude(outcome, again(request, outcome.run), listener)
    return _conclude_sweep(outcome, request, listener)


def print_preview(shown: Preview, explain: bool, as_json: bool) -> None:
    """Print the job script, its explanation, or the document of a planned launch."""
    if as_json:
        click.echo(json.dumps(shown.document()))
    elif explain:
        click.echo(f"# template: {shown.script.template}")
        for line, why in shown.script.explanations:
            click.echo(f"{line}\n    {why}")
        click.echo("# choices of the job file")
        for choice in shown.plans[0].resolution.keys:
            if choice.why:
                click.echo(f"{choice.key} = {json.dumps(choice.value)}\n    {choice.why}")
        if (expected := shown.plans[0].record.expected) is not None:
            lines = {name: duration(seconds) for name, seconds in expected.parts.items()}
            lines |= {f"memory of {name}": memory_size(size) for name, size in expected.fullest.items()}
            click.echo("\n    ".join(("# expected of a step, and held by the fullest GPU", *map(" ".join, lines.items()))))
        click.echo("# defaults of the keys that the job file leaves out")
        for section, values in defaults(shown.plans[0].user_spec).items():
            click.echo(f"[{section}] {values}")
    elif shown.used:
        click.echo(shown.script.text, nl=False)


def _conclude_sweep(outcome: Outcome, request: LaunchRequest, listener: Listener) -> int:
    """Report each run of a sweep, and the command that resumes incomplete ones. Return the exit code."""
    ended = [element for element in outcome.elements if element.state != "submitted"]
    best = best_of((element.loss, best_evaluation(_evaluations(element))) for element in ended)
    for index, element in enumerate(ended):
        member = read_member(RunDirectory(element.run))
        marked = f"  ← best by {best[1]}" if best is not None and index == best[0] else ""
        values = words_of(member.values) if member is not None else ""
        listener.say(f"{element.run.name:<9} {element.state}{_loss_words(element)}; {values or 'the job file as it is'}{marked}")
    if sum(element.steps > 0 for element in ended) > 1:
        listener.say(f"compare   {shlex.join(['hpc-mp', 'report', str(ended[0].run), '--all'])}")
    for element in ended:
        if element.state in ("failed", "stopped"):
            cause = f": {element.cause.message}" if element.cause is not None else ""
            way = "" if outcome.not_started else f"\ncontinue with: {go_on(RunDirectory(element.run))}"
            listener.note(f"hpc-mp: {element.run} {element.state}{cause}{way}")
    if outcome.not_started:
        listener.note(f"continue with: {again(request, outcome.run)}")
    return int(outcome.state in ("failed", "stopped"))


def _evaluations(outcome: Outcome) -> list[Evaluation]:
    return read_records(RunDirectory(outcome.run).evaluations, Evaluation)


def _loss_words(outcome: Outcome) -> str:
    held_out = best_evaluation(_evaluations(outcome))
    return _curve_words(outcome, ", loss ") + ("" if held_out is None else f", best held out {held_out.words}")


def _curve_words(outcome: Outcome, before: str) -> str:
    """Return the first and the last loss, after ``before``; empty without a loss."""
    if outcome.first_loss is None or outcome.loss is None:
        return ""
    first, last = outcome.first_step, outcome.steps
    steps = counted(last, "step") if first <= 1 else f"step {last}" if first == last else f"steps {first:,} to {last:,}"
    return f"{before}{loss_number(outcome.first_loss)} → {loss_number(outcome.loss)} in {steps}"


def _conclude(outcome: Outcome, way: str, listener: Listener) -> int:
    """Report the outcome and return the exit code. Raises RunFailed."""
    if outcome.state == "completed":
        lines = (*_last_words(RunDirectory(outcome.run)), "ended     completed")
        listener.say("\n".join((*lines, f"logs      {shlex.join(['hpc-mp', 'logs', str(outcome.run)])}")))
    if curve := _curve_words(outcome, "loss      "):
        speed = f", {outcome.tokens_per_s:,.0f} tokens/s on average" if outcome.tokens_per_s else ""
        listener.say(curve + speed)
    if evaluations := _evaluations(outcome):
        newest, best = evaluations[-1], best_evaluation(evaluations)
        better = f", best {best.words}" if best is not None and not best.cost >= newest.cost else ""
        listener.say(f"held out  {newest.words}{better}")
    if outcome.checkpoint is not None:
        listener.say(f"saved     {outcome.checkpoint}")
    if outcome.best_checkpoint not in (None, outcome.checkpoint):
        listener.say(f"best      {outcome.best_checkpoint}, by evaluate.best (hpc-mp export --best exports it)")
    if outcome.report is not None:
        listener.say(f"report    {outcome.report}")
    cause = outcome.cause
    if outcome.state == "completed" and outcome.checkpoint is not None:
        listener.say(f"export    {shlex.join(['hpc-mp', 'export', str(outcome.run), '--output'])} DIRECTORY")
    if outcome.state == "stopped":
        program = RunDirectory(outcome.run).program.exists()  # the steps of a program are unknown
        where = "" if program else f" after step {outcome.steps}{_lost(outcome)}"
        raise RunFailed(f"stopped{where}{f': {cause.message}' if cause is not None else ''}. Continue with: {way}")
    if cause is not None and cause.kind == "user":
        listener.note(f"hpc-mp: {cause.message}")
        return 2
    if cause is not None and cause.kind == "removed":
        raise RunFailed(cause.message)
    if cause is not None:
        log = f"its log:    {cause.log}\n" if cause.log else ""
        mend = MEND_PROGRAM if RunDirectory(outcome.run).program.exists() else MEND_FIRST
        first = mend.get(cause.kind)
        raise RunFailed(f"{cause.message}\n{log}{f'{first}, then ' if first else ''}continue with: {way}")
    return 0


def _last_words(run: RunDirectory) -> Iterator[str]:
    """Yield the last lines of a program's first rank."""
    sources = Logs(run, None).rank(0) if run.program.exists() else ()
    lines = [line for source in sources for line in source.lines(tail(source.path)) if line.strip()]
    for number, line in enumerate(lines[-LAST_WORDS:]):
        yield f"{'' if number else 'output':<9} {line}"


def _lost(outcome: Outcome) -> str:
    """Return words for the steps after the last checkpoint: killed ranks have not saved."""
    saved = step_of(outcome.checkpoint) if outcome.checkpoint is not None else 0
    if saved == outcome.steps:
        return ""
    return f", with {'a checkpoint of step ' + str(saved) if saved else 'no checkpoint'}: {lost_words(outcome.steps - saved)}"
