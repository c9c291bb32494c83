"""``hpc-mp adopt``: conversion of a user's job script to a job file, with an account of every line."""

import json
import re
import shlex
import sys
from dataclasses import asdict
from difflib import unified_diff
from pathlib import Path

import click

from hpc_mp.adopt import AdoptedJob, Fate, adopt
from hpc_mp.adopt.account import job_text
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import text_of
from hpc_mp.base.text import escaped
from hpc_mp.cli.output import terminal, write_new
from hpc_mp.launch.render import find_template, render
from hpc_mp.launch.run_files import next_run

_NO_SCRIPTS = frozenset({".json", ".jsonl", ".yaml", ".yml", ".ini", ".cfg", ".conf", ".md", ".rst", ".csv", ".ipynb"})
COLOURS = {Fate.KEPT: "green", Fate.REPLACED: "cyan", Fate.DROPPED: "dim", Fate.LOST: "red"}


@click.command(help="Convert a job script to a job file with [program]. The script is read and never run. Every line of it is "
                    "accounted for: kept, replaced, dropped, or not carried over. It is read as if sbatch were called in this "
                    "directory with SCRIPT and ARG….")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, metavar="[ARG]…")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path, allow_dash=True), metavar="FILE",
              help="The job file; - prints it.  [default: job.toml]")
@click.option("--diff", is_flag=True, help="Show the differences from the job script that hpc-mp would submit; write a job "
                                           "file only with -o.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(script: Path, arguments: tuple[str, ...], output: Path | None, diff: bool, force: bool, as_json: bool) -> None:
    text = text_of(script, "job script")
    _check_kind(script, text)
    path = output or Path("job.toml")
    printed = str(path) == "-"
    base = Path.cwd() if printed else path.absolute().parent
    job = adopt(text, directory=Path.cwd(), job_directory=base, file=script, arguments=arguments)
    written = job_text(job.tree, script.name, job.lost, job.notes)
    difference = _difference(job, text, script) if diff else ""
    if not printed and (output is not None or not diff):
        write_new(path, written, force)
    if as_json:
        account = [asdict(line) | {"fate": line.fate.value} for line in job.account]
        click.echo(json.dumps({"job_file": str(path), "text": written, "diff": difference, "notes": job.notes,
                               "account": account}))
        return
    if diff:
        click.echo(difference, nl=False)
    else:
        _print_account(job, aside=printed)
    if printed:
        click.echo(written, nl=False)
    elif output is not None or not diff:
        click.echo(f"\nwrote {path}; check it, then run\n\n    hpc-mp launch {shlex.quote(str(path))} --dry-run\n")


def _check_kind(script: Path, text: str) -> None:
    """Raise HpcMpError for a file that is not a job script: it has its own command, or starts no program."""
    if "\0" in text[:4096]:
        raise HpcMpError(str(script), "is not a text file", "pass the script that is submitted with sbatch")
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        raise HpcMpError(str(script), "contains no command", "pass the script that is submitted with sbatch")
    if re.search(r"^#SBATCH\b", text, re.MULTILINE):
        return
    if script.suffix == ".toml":
        raise HpcMpError(str(script), "is a job file, not a job script", f"hpc-mp launch {shlex.quote(str(script))} starts it")
    if script.suffix in _NO_SCRIPTS and not text.startswith("#!"):
        raise HpcMpError(str(script), "is not a job script by its name", "pass the script that is submitted with sbatch")
    if script.suffix == ".py" or re.match(r"#!.*\bpython", text):
        raise HpcMpError(str(script), "is a Python program, not a job script",
                         f"hpc-mp run -- python {shlex.quote(str(script))} starts it")


def _difference(job: AdoptedJob, text: str, script: Path) -> str:
    """Return a unified diff from the script to our rendered script, for a cluster without known facts."""
    rendered = render(job.spec, next_run(job.spec), python=sys.executable, template=find_template(Path.cwd())).text
    lines = unified_diff(text.splitlines(), rendered.splitlines(), str(script), "the job script of hpc-mp", lineterm="", n=3)
    return "".join(f"{line}\n" for line in lines)


def _print_account(job: AdoptedJob, *, aside: bool) -> None:
    """Print the fate of each line of the script, then the lines that need attention."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True) if aside else terminal()
    for line in job.account:
        where = f" → {line.where}" if line.where else ""
        why = f"  ({line.why})" if line.why else ""
        console.print(f"{line.place:>7}  [{COLOURS[line.fate]}]{line.fate.value}[/]  {escape(escaped(line.text + where + why))}")
    counts = (f"{sum(line.fate is fate for line in job.account)} {fate.value}" for fate in Fate)
    console.print(f"\n{', '.join(counts)}")
    for line in job.lost:
        console.print(f"[red]not carried over[/], line {line.place}: {escape(escaped(line.text))}")
        console.print(f"    {escape(escaped(line.why))}")
    for note in job.notes:
        console.print(f"note: {escape(escaped(note))}")
