"""``hpc-mp lint``: what is wrong with a job script."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from hpc_mp.errors import HpcMpError
from hpc_mp.launch.lint import Finding, Severity, lint

COLOURS: dict[Severity, str] = {"error": "red", "warning": "yellow", "info": "cyan"}


@click.command(help="Find what is wrong with an sbatch script; exit 1 if something is wrong on any cluster. The script "
                    "is read as if sbatch were called in this directory, and never run.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--slurm-version", metavar="24.05", help="What the script is for; without it, every release counts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(file: Path, slurm_version: str | None, as_json: bool) -> None:
    findings = lint(_text(file), directory=Path.cwd(), version=_version(slurm_version))
    if as_json:
        click.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        _print(file, findings)
    if any(finding.severity == "error" for finding in findings):
        raise click.exceptions.Exit(1)


def _text(file: Path) -> str:
    """The file with its own line ends; bytes that are no UTF-8 stay visible as replacement characters."""
    try:
        return file.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise HpcMpError(str(file), f"cannot be read ({error.strerror})", "name a job script") from None


def _version(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d\d)\.(\d\d)(\.\d+)?", text)
    if not found:
        raise HpcMpError(f"--slurm-version {text}", "is no release of Slurm",
                         "write it as 24.05; sinfo --version tells it")
    return int(found[1]), int(found[2])


def _print(file: Path, findings: tuple[Finding, ...]) -> None:
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    for each in findings:
        severity = f"[{COLOURS[each.severity]}]{each.severity}[/]"
        console.print(f"{escape(str(file))}:{each.line}: {severity} {each.code} {escape(each.message)}\n"
                      f"    → {escape(each.fix)}")
    counts = Counter(finding.severity for finding in findings)
    console.print(", ".join(f"{counts[severity]} {severity}" + "s" * (severity != "info" and counts[severity] != 1)
                            for severity in COLOURS if counts[severity]) or "Nothing found.")
