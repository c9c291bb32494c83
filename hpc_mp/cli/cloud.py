"""``hpc-mp cloud``: a Slurm cluster from a subscription, on Azure, AWS or Google Cloud; what is wrong with a template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpc_mp.base.files import text_of
from hpc_mp.catalogue import catalogue
from hpc_mp.cli.cloud_azure import render_azure
from hpc_mp.cli.cloud_others import render_others
from hpc_mp.cli.output import finish
from hpc_mp.clouds import CLOUDS
from hpc_mp.clouds.azure import lint, read_given, read_project


@click.group(help="Write a Slurm cluster for Azure, AWS or Google Cloud, and check a template. Nobody is asked and nothing is "
                  "created but files.")
def command() -> None:
    pass


class Render(click.Command):
    """``render``: the machine says the cloud, and the cloud says which of the options count.

    The words are read once with the options of all clouds, for help and completion, and again by the command of that cloud.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["words"] = list(args)
        known = {option for each in self.params for option in each.opts}
        if any(word.partition("=")[0] not in known for word in args if word.startswith("--")):
            return []  # the cloud's own command says which option it has not
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        words = ctx.meta["words"]
        chosen = _of_cloud(_sku(words))
        return chosen.main(words, prog_name=ctx.command_path, standalone_mode=False)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        both = {name for each in render_azure.params for name in each.opts} & {
            name for each in render_others.params for name in each.opts}
        for title, rows in (("Any cloud", [each for each in self.params if each.opts[0] in both or each.name == "help"]),
                            ("Azure", [each for each in render_azure.params if each.opts[0] not in both]),
                            ("AWS and Google Cloud", [each for each in render_others.params if each.opts[0] not in both])):
            with formatter.section(title):
                formatter.write_dl([row for each in rows if (row := each.get_help_record(ctx))])


def _sku(words: list[str]) -> str | None:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--sku"):
            return word.partition("=")[2] if "=" in word else after
    return None


def _of_cloud(sku: str | None) -> click.Command:
    """Azure's command asks on a terminal for what is missing. Of names that are not known those with a _ look like Azure's."""
    if sku is None:
        return render_azure
    known = catalogue().machine(sku) or catalogue().machine(f"Standard_{sku}")
    return render_others if (known.cloud in CLOUDS if known else "_" not in sku) else render_azure


command.add_command(Render(
    "render", params=list({each.opts[0]: each for each in (*render_others.params, *render_azure.params)}.values()),
    help="Write the configuration of a Slurm cluster for so many machines of a kind: for Azure CycleCloud, AWS ParallelCluster "
         "or Google's Cluster Toolkit. The machine's name says the cloud. Says what quota it needs, and what a job will see. "
         "Nothing is started."))


@command.command("lint", help="Find what is wrong with a CycleCloud template, before it is imported; exit 1 if something is "
                              "wrong in any subscription. Nothing is run, and nobody is asked.")
@click.argument("template", type=click.Path(path_type=Path))
@click.option("--params", type=click.Path(path_type=Path), metavar="FILE",
              help="The JSON file of parameters that the cluster is to have; without it each parameter has its default.")
@click.option("--project", type=click.Path(path_type=Path), metavar="DIR",
              help="The project whose specs the template uses (the directory with project.ini): its scripts are looked at too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def lint_template(template: Path, params: Path | None, project: Path | None, as_json: bool) -> None:
    findings = lint(text_of(template, "cluster template"), file=str(template), given=read_given(params) if params else None,
                    project=read_project(project) if project else None)
    finish(findings, as_json)
