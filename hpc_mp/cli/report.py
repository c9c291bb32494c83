"""``hpc-mp report``: draw a run."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_mp.launch.find import find
from hpc_mp.report.page import write_report


@click.command(help="Draw a run: curves, ranks, pipeline, memory. Writes RUN/report.html and prints its path.")
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> None:
    click.echo(write_report(find(run)))
