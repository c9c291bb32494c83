"""``hpc-mp cloud``: files of a Slurm cluster in an Azure subscription; problems of a template."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_mp.base.files import text_of
from hpc_mp.cli.cloud_azure import render_azure
from hpc_mp.cli.output import finish
from hpc_mp.clouds.azure.files import read_parameters, read_project
from hpc_mp.clouds.azure.rules import lint


@click.group(help="Write a Slurm cluster for Azure CycleCloud, and check a template. Only files are created.")
def command() -> None:
    pass


command.add_command(render_azure, "render")


@command.command("lint", help="Find faults in a CycleCloud template before it is imported; exit 1 if one is a fault in any "
                              "subscription. Nothing is run, and no service is queried.")
@click.argument("template", type=click.Path(path_type=Path))
@click.option("--params", type=click.Path(path_type=Path), metavar="FILE",
              help="JSON file of the cluster's parameters; without it each parameter has its default.")
@click.option("--project", type=click.Path(path_type=Path), metavar="DIR",
              help="Project whose specs the template uses (the directory with project.ini); its scripts are checked too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def lint_template(template: Path, params: Path | None, project: Path | None, as_json: bool) -> None:
    findings = lint(text_of(template, "cluster template"), file=str(template),
                    parameters=read_parameters(params) if params else None, project=read_project(project) if project else None)
    finish(findings, as_json)
