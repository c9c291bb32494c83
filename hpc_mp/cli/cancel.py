"""``hpc-mp cancel``: end a run, after its ranks have saved."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpc_mp.launch.cancel import end
from hpc_mp.launch.status import overview
from hpc_mp.rundir import find_run


@click.command(help="End a run: its ranks save at the next step and stop, and nothing queues them again.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--now", is_flag=True, help="End it at once; steps since the last checkpoint are lost.")
@click.option("--grace", type=click.FloatRange(min=1), default=120.0, show_default=True, metavar="SECONDS",
              help="How long ranks have to save and stop.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON document on stdout; all else goes to stderr.")
def command(run: Path, now: bool, grace: float, as_json: bool) -> None:
    found = find_run(run)
    before = overview(found)
    if before.ended and not before.successors:
        after = before
        click.echo(f"nothing to do: the run has {before.state}", err=as_json)
    else:
        after = end(found, before, 0.0 if now else grace, lambda text: click.echo(text, err=as_json))
        saved = f"; saved {after.checkpoint}" if after.checkpoint is not None else ""
        click.echo(f"{after.state} after step {after.step}{saved}", err=as_json)
    if as_json:
        click.echo(json.dumps(after.document()))
