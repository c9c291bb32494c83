"""``hpc-mp prune``: list and remove data of runs."""

import json
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted, data_size
from hpc_mp.cli.output import short_path
from hpc_mp.rundir import RunDirectory
from hpc_mp.runs.find import find_all, here, listing, runs_below
from hpc_mp.runs.prune import Pruning, prunable, remove


@click.command(help="List removable data with its size: checkpoints beyond the newest and the best, leftovers of crashed saves, "
                    "unused caches; with --runs, whole runs. Only --yes removes it. Runs that may still continue are not "
                    "touched. Without RUN: all runs of the job files here; a directory of several jobs selects all runs in it.")
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--keep", type=click.IntRange(min=1), metavar="N",
              help="Number of newest checkpoints to keep.  [default: checkpoint.keep]")
@click.option("--runs", "whole", is_flag=True,
              help="Whole runs with all their files. To be removed, runs must be named.")
@click.option("--yes", is_flag=True, help="Remove the listed data.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(runs: tuple[Path, ...], keep: int | None, whole: bool, yes: bool, as_json: bool) -> int:
    if whole and yes and not runs:
        raise HpcMpError("--runs --yes", "removes whole runs, which must be named",
                         "name them: hpc-mp prune runs/NAME/0001 --runs --yes")
    if whole and keep is not None:
        raise HpcMpError(f"--runs --keep {keep}", "exclude each other: --keep is for checkpoints", "leave one of them out")
    pruning = prunable(_meant(runs), keep, whole)
    removed: list[Path] = []
    if not as_json:
        _print(pruning)
    failed = remove(pruning, lambda item: removed.append(item.path)) if yes else {}
    if as_json:
        click.echo(json.dumps(pruning.document(removed, failed)))
        return 1 if failed else 0
    for path, reason in failed.items():
        click.echo(f"hpc-mp: {path}: {reason}", err=True)
    freed = data_size(sum(item.bytes for item in pruning.removable if item.path in removed))
    if yes:
        click.echo(f"removed {counted(len(removed), 'thing')}, {freed}")
    elif pruning.removable:
        click.echo(f"{counted(len(pruning.removable), 'thing')}, {data_size(pruning.bytes)}, can be removed: "
                   + ("repeat with --yes" if runs or not whole else "name the runs, with --runs --yes"))
    else:
        click.echo("nothing to remove")
    return 1 if failed else 0


def _meant(runs: tuple[Path, ...]) -> list[RunDirectory]:
    """Return the named runs without repetitions; by default those of the current directory. Raises HpcMpError without runs."""
    if runs:
        return list(dict.fromkeys(run for path in runs for run in _named(path)))
    directories = sorted(runs_below(here()), key=lambda run: run.path)
    if not directories:
        raise HpcMpError(", ".join(map(str, here())), "contains no runs", "name a run, or use the directory of a job file")
    return directories


def _named(path: Path) -> list[RunDirectory]:
    directories = listing(path)
    return find_all(path) if directories is None else sorted(runs_below(directories), key=lambda run: run.path) or find_all(path)


def _print(pruning: Pruning) -> None:
    width = max((len(data_size(item.bytes)) for item in pruning.removable), default=0)
    for item in pruning.removable:
        click.echo(f"{item.kind:<10} {data_size(item.bytes):>{width}}  {short_path(item.path)}  ({item.why})")
        for referrer in item.referrers:
            click.echo(f"{'':<10} {'':>{width}}  started from it: {referrer}")
    for spared in pruning.spared:
        click.echo(f"{'kept':<10} {'':>{width}}  {short_path(spared.path)}  ({spared.why})")
