"""``hpc-mp cancel``: end a run, or all runs of a sweep, after their ranks have saved."""

import json
import shlex
from pathlib import Path

import click

from hpc_mp.base.text import several
from hpc_mp.cli.status import lost_words
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.checkpoints import step_of
from hpc_mp.rundir.runs import end_sweep
from hpc_mp.runs.cancel import end
from hpc_mp.runs.find import find_all, sweep_of
from hpc_mp.runs.keepers import job_of
from hpc_mp.runs.status import RunStatus, overviews


@click.command(help="End a run: its ranks save at the next step and stop, and the job is not requeued. RUN is a run directory, "
                    "DIRECTORY/NAME for the newest run of a job, or the id of a Slurm job; the id of a sweep selects all its "
                    "runs.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--all", "whole", is_flag=True, help="End all runs of this run's sweep.")
@click.option("--now", is_flag=True, help="End it at once; steps since the last checkpoint are lost.")
@click.option("--grace", type=click.FloatRange(min=1), default=120.0, show_default=True, metavar="SECONDS",
              help="Time for ranks to save and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end; all other output goes to stderr.")
def command(run: Path, whole: bool, now: bool, grace: float, as_json: bool) -> None:
    runs = find_all(run)
    selected = sweep_of(runs[0]) if whole else runs
    states = overviews(selected)
    before = dict(zip(selected, states, strict=True))
    if len(selected) > 1 or whole:
        end_sweep(selected[0])
    live = {directory: status for directory, status in before.items() if not status.ended or status.successors}
    after = before | end(live, 0.0 if now else grace, lambda text: click.echo(text, err=as_json))
    for directory in selected:
        name = f"{directory.path}: " if len(selected) > 1 else ""
        message = _came_to(after[directory]) if directory in live else f"nothing to do: the run is {after[directory].state}"
        click.echo(name + message, err=as_json)
    _others(selected, as_json)
    if as_json:
        documents = [after[directory].document() for directory in selected]
        click.echo(json.dumps(documents[0] if len(documents) == 1 else {"runs": documents}))


def _came_to(status: RunStatus) -> str:
    """Return the end of a run in words: ``stopped after step 53; saved …/step-00000040: 13 steps are lost``."""
    if not status.steps:  # what a program has saved is unknown
        return f"{status.state} after step {status.step}" if status.step else status.state
    unsaved = status.step - (step_of(status.checkpoint) if status.checkpoint is not None else 0)
    saved = f"; saved {status.checkpoint}" if status.checkpoint is not None else "; no checkpoint" if status.step else ""
    return f"{status.state} after step {status.step}{saved}" + (f": {lost_words(unsaved)}" if unsaved > 0 else "")


def _others(ended: list[RunDirectory], aside: bool) -> None:
    """Print the other active runs of a sweep, if only one run was selected."""
    others = [run for run in sweep_of(ended[0]) if run not in ended]
    active = [run for run, status in zip(others, overviews(others), strict=True) if not status.ended]
    if active:
        ids = several([job_of(run) or run.path.name for run in active])
        cancel_all = shlex.join(["hpc-mp", "cancel", str(ended[0].path), "--all"])
        click.echo(f"the other runs of the sweep continue: {ids}; `{cancel_all}` ends them too", err=aside)
