"""``hpc-mp cancel``: end a run, or all runs of a sweep, after their ranks have saved."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from hpc_mp.base.text import several
from hpc_mp.cli.status import lost_words
from hpc_mp.launch.cancel import end
from hpc_mp.launch.find import find_all, job_of, sweep_of
from hpc_mp.launch.status import RunStatus, overviews
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.checkpoints import step_of
from hpc_mp.rundir.sweep import end_sweep


@click.command(help="End a run: its ranks save at the next step and stop, and nothing queues them again. RUN is a run directory, "
                    "DIRECTORY/NAME for the newest run of a job, or the id of a Slurm job; that of a sweep means all its runs.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--all", "whole", is_flag=True, help="End all runs of the sweep that this one belongs to.")
@click.option("--now", is_flag=True, help="End it at once; steps since the last checkpoint are lost.")
@click.option("--grace", type=click.FloatRange(min=1), default=120.0, show_default=True, metavar="SECONDS",
              help="How long ranks have to save and stop.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON document on stdout; all else goes to stderr.")
def command(run: Path, whole: bool, now: bool, grace: float, as_json: bool) -> None:
    found = find_all(run)
    meant = sweep_of(found[0]) if whole else found
    states = overviews(meant)
    before = dict(zip(meant, states, strict=True))
    if len(meant) > 1 or whole:
        end_sweep(meant[0])
    live = {each: seen for each, seen in before.items() if not seen.ended or seen.successors}
    after = before | end(live, 0.0 if now else grace, lambda text: click.echo(text, err=as_json))
    for each in meant:
        name = f"{each.path}: " if len(meant) > 1 else ""
        words = _came_to(after[each]) if each in live else f"nothing to do: the run has {after[each].state}"
        click.echo(name + words, err=as_json)
    _others(meant, as_json)
    if as_json:
        documents = [after[each].document() for each in meant]
        click.echo(json.dumps(documents[0] if len(documents) == 1 else {"runs": documents}))


def _came_to(seen: RunStatus) -> str:
    """Return the end of a run in words: ``stopped after step 53; saved …/step-00000040: 13 steps are lost``."""
    if not seen.steps:  # of a program nobody knows what it has saved
        return f"{seen.state} after step {seen.step}" if seen.step else seen.state
    unsaved = seen.step - (step_of(seen.checkpoint) if seen.checkpoint is not None else 0)
    saved = f"; saved {seen.checkpoint}" if seen.checkpoint is not None else "; nothing is saved" if seen.step else ""
    return f"{seen.state} after step {seen.step}{saved}" + (f": {lost_words(unsaved)}" if unsaved > 0 else "")


def _others(ended: list[RunDirectory], aside: bool) -> None:
    """Print the other active runs of a sweep, if only one run was selected."""
    others = [run for run in sweep_of(ended[0]) if run not in ended]
    going = [run for run, seen in zip(others, overviews(others), strict=True) if not seen.ended]
    if going:
        ids = several([job_of(run) or run.path.name for run in going])
        click.echo(f"the other runs of the sweep go on: {ids}; `{shlex.join(['hpc-mp', 'cancel', str(ended[0].path), '--all'])}` "
                   "ends them too", err=aside)
