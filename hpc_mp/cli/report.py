"""``hpc-mp report``: the page of a run, or of several runs."""

from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.report.comparison import write_comparison
from hpc_mp.report.page import write_report
from hpc_mp.rundir import RunDirectory
from hpc_mp.runs.find import find_all, sweep_of


@click.command(help="Draw a run: curves, ranks, pipeline, memory. Writes RUN/report.html and prints its path. Several runs are "
                    "compared on one page, comparison.html of the first: overlaid curves, differences of the job files, and "
                    "results. The id of a sweep's Slurm job selects all its runs.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--all", "whole", is_flag=True, help="Compare all runs of this run's sweep.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE.html", help="Write this file instead.")
def command(runs: tuple[Path, ...], whole: bool, output: Path | None) -> None:
    if output is not None and output.suffix != ".html":
        raise HpcMpError(f"--output {output}", "is not an .html file", f"write --output {output.with_suffix('.html')}")
    selected = _each_once(runs, whole)
    click.echo(write_report(selected[0], output) if len(selected) == 1 else write_comparison(selected, output))


def _each_once(paths: tuple[Path, ...], whole: bool) -> list[RunDirectory]:
    """Return the selected runs; with ``whole`` the sweep of each. Raises HpcMpError for a path without a run, or a repetition."""
    selected: dict[RunDirectory, Path] = {}
    for path in paths:
        meant = find_all(path)
        for run in sweep_of(meant[0]) if whole else meant:
            if run in selected:
                raise HpcMpError(f"run {path}", f"is {run.path}, the same as {selected[run]}",
                                 "name every run once; DIRECTORY/NAME is the newest run of a job")
            selected[run] = path
    return list(selected)
