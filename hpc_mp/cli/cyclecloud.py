"""``hpc-mp cyclecloud``: what concerns a cluster on Azure CycleCloud."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from hpc_mp.cli.cyclecloud_render import render_command
from hpc_mp.cyclecloud import Finding, Severity, lint, read_given, read_project
from hpc_mp.errors import HpcMpError

COLOURS: dict[Severity, str] = {"error": "red", "warning": "yellow", "info": "cyan"}


@click.group(help="Clusters on Azure CycleCloud.")
def command() -> None:
    pass


command.add_command(render_command, "render")


@command.command("lint", help="Find what is wrong with a cluster template, before it is imported; exit 1 if something is wrong "
                              "in any subscription. Nothing is run, and nobody is asked.")
@click.argument("template", type=click.Path(path_type=Path))
@click.option("--params", type=click.Path(path_type=Path), metavar="FILE",
              help="The JSON file of parameters that the cluster is to have; without it each parameter has its default.")
@click.option("--project", type=click.Path(path_type=Path), metavar="DIR",
              help="The project whose specs the template uses (the directory with project.ini): its scripts are looked at too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def lint_command(template: Path, params: Path | None, project: Path | None, as_json: bool) -> None:
    findings = lint(_text(template), file=str(template), given=read_given(params) if params else None,
                    project=read_project(project) if project else None)
    if as_json:
        click.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        _print(findings)
    if any(finding.severity == "error" for finding in findings):
        raise click.exceptions.Exit(1)


def _text(file: Path) -> str:
    """The file with its own line ends; bytes that are no UTF-8 stay visible as replacement characters."""
    try:
        return file.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise HpcMpError(str(file), f"cannot be read ({error.strerror})", "name a cluster template") from None


def _print(findings: tuple[Finding, ...]) -> None:
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    for each in findings:
        severity = f"[{COLOURS[each.severity]}]{each.severity}[/]"
        console.print(f"{escape(each.file)}:{each.line}: {severity} {each.code} {escape(each.message)}\n    → {escape(each.fix)}")
    counts = Counter(finding.severity for finding in findings)
    console.print(", ".join(f"{counts[severity]} {severity}" + "s" * (severity != "info" and counts[severity] != 1)
                            for severity in COLOURS if counts[severity]) or "Nothing found.")
