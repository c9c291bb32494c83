"""``hpc-mp cloud``: files of a Slurm cluster in an Azure subscription from a size and a number of nodes; faults of templates."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args

import click
from click.core import ParameterSource

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.plugins import plugin
from hpc_mp.cli.output import finish
from hpc_mp.clouds.azure.offer import Offer, load_offer
from hpc_mp.clouds.azure.render.options import Choices, Storage, find_size, settle, sizes_on_offer
from hpc_mp.clouds.azure.render.summary import azure_summary
from hpc_mp.clouds.azure.render.workspace import SERVER, choices_within
from hpc_mp.clouds.azure.render.write import refuse_full, write

Answer = TypeVar("Answer")


@click.command(help="Write a directory for CycleCloud: a project, a Slurm template and the parameters for a number of machines "
                    "of a size. Prints the quota that it needs and the resources of a node. Without --sku or --nodes it asks "
                    "in a terminal. Nothing is started, and no service is queried.")
@click.option("--sku", metavar="SIZE", help="Size of the nodes that train, such as Standard_ND96isr_H100_v5.")
@click.option("--nodes", type=int, metavar="N", help="The maximum number of them.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR",
              help="The directory to write [default: the cluster's name].")
@click.option("--name", default="hpc-mp", show_default=True, help="Name of the cluster; nodes are named after it.")
@click.option("--region", help="Region in Azure's interfaces, such as westeurope [default: chosen in CycleCloud's form].")
@click.option("--subnet", metavar="GROUP/NETWORK/SUBNET", help="Subnet of all nodes [default: chosen in CycleCloud's form].")
@click.option("--credentials", help="Account in CycleCloud [default: chosen in its form].")
@click.option("--image", metavar="URN|ID", help="Image of the nodes that train [default: an HPC image for the size].")
@click.option("--storage", type=click.Choice(get_args(Storage)), default="nfs", show_default=True,
              help="/shared is a disk of the scheduler (nfs), or another NFS server (external); amlfs: Azure Managed Lustre at "
                   "/data beside that disk.")
@click.option("--storage-address", metavar="HOST[:/PATH]", help="Address of the NFS server or of Lustre.")
@click.option("--accounting/--no-accounting", default=True, show_default=True,
              help="Keep accounts of jobs; this needs a MySQL server.")
@click.option("--database", metavar="HOST", help="The MySQL server.")
@click.option("--database-user", metavar="NAME", help="User of the MySQL server; the form asks for the password.")
@click.option("--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Wheel of hpc-mp for the cluster to install [default: from pip's index].")
@click.option("--login-nodes", type=int, default=1, show_default=True, help="Login nodes; with 0 users log in to the scheduler.")
@click.option("--htc-nodes", type=int, default=8, show_default=True, help="Maximum number of CPU nodes for work on one machine.")
@click.option("--workspace", "as_workspace", is_flag=True,
              help="Write parameters for Azure CycleCloud Workspace for Slurm too, if there is no CycleCloud yet.")
@click.option("--resource-group", metavar="NAME", help="Resource group of the workspace [default: the cluster's name and -rg].")
@click.option("--project-url", metavar="URL",
              help="GitHub release of the project: its specs are added to the workspace's own cluster.")
@click.option("--json", "json_", is_flag=True, help="Print one JSON document.")
def render_azure(sku: str | None, nodes: int | None, output: Path | None, as_workspace: bool, resource_group: str | None,
                   project_url: str | None, wheel: Path | None, json_: bool, **options: object) -> None:
    offer = load_offer()
    directory = output or Path(str(options["name"]))
    if sku is None or nodes is None:
        _refuse_without_terminal(sku, nodes, quiet=json_)
        refuse_full(directory)  # before the user answers questions in vain
        sku, nodes = _asked_machines(sku, nodes, offer)
        as_workspace = as_workspace or _asked_workspace()
        options |= _asked_rest(sku, nodes, offer, as_workspace=as_workspace)
    choices = Choices(sku=sku, nodes=nodes, **options)  # type: ignore[arg-type]  # each option above is a field of that type
    workspace = None
    if as_workspace:
        choices, workspace = choices_within(choices, resource_group, project_url)
    elif resource_group or project_url:
        option = "--resource-group" if resource_group else "--project-url"
        raise HpcMpError(option, "has no effect without --workspace", "add --workspace, or omit it")
    summary = azure_summary(settle(choices, offer), offer, SERVER if workspace else None)
    written = write(directory, summary, workspace, wheel)
    if json_:
        click.echo(json.dumps({"directory": str(directory), "files": [str(path) for path in written], **summary.document()}))
        return
    click.echo("\n".join(summary.words()))
    click.echo(f"\nwrote {directory}; {directory / 'README.txt'} describes the next steps")


def _refuse_without_terminal(sku: str | None, nodes: int | None, *, quiet: bool) -> None:
    missing = [option for option, value in (("--sku", sku), ("--nodes", nodes)) if value is None]
    if quiet or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise HpcMpError(" and ".join(missing), "missing, and there is no terminal to ask in",
                         "use --sku SIZE and --nodes N, such as --sku Standard_ND96isr_H100_v5 --nodes 4")


def _asked_machines(sku: str | None, nodes: int | None, offer: Offer) -> tuple[str, int]:
    if sku is None:
        for size in sizes_on_offer(offer):
            if size.gpus and size.rdma:
                click.echo(f"  {size.name:32} {size.gpus} × {size.gpu_title}, {size.nics} × InfiniBand {size.rdma_gbps} Gb/s")
        click.echo("  Standard_D8ads_v5                CPU, for a first try; other sizes: env/machines")
        sku = click.prompt("Size of the training nodes", default="Standard_ND96isr_H100_v5",
                           value_proc=_again(lambda answer: find_size(answer, offer).name))
    size = find_size(sku, offer)
    if nodes is None:
        nodes = click.prompt("Maximum number of them (they start when jobs wait for them)",
                             default="1" if size.twin else str(size.nvlink_block or 2),
                             value_proc=_again(lambda answer: _number(answer, size.name, offer)))
    return size.name, nodes


def _number(answer: str, sku: str, offer: Offer) -> int:
    if not answer.strip().isdecimal():
        raise HpcMpError(answer, "is not a number of machines", "type the maximum number of machines of the cluster")
    return settle(Choices(sku, int(answer)), offer).choices.nodes


def _asked_workspace() -> bool:
    """Ask if parameters must be written for a workspace. Return False, without a question, if an option settles it."""
    if any(map(_is_given, ("as_workspace", "subnet", "credentials"))):
        return False
    return not click.confirm("Is there a CycleCloud server (otherwise parameters for a workspace with one are written)?",
                             default=True)


def _asked_rest(sku: str, nodes: int, offer: Offer, *, as_workspace: bool) -> dict[str, object]:
    """Return answers to the questions that no option answers, by field of Choices."""
    answers: dict[str, object] = {}
    if not _is_given("region"):
        empty = "" if as_workspace else " (empty: chosen in CycleCloud's form)"
        answers["region"] = click.prompt(
            f"Region, such as westeurope{empty}", default=None if as_workspace else "", show_default=False,
            value_proc=_again(lambda answer: settle(Choices(sku, nodes, region=answer or None), offer).choices.region))
    if not any(map(_is_given, ("accounting", "database", "database_user"))):
        answers["accounting"] = click.confirm(
            "Is there a MySQL server for accounts of jobs (otherwise there is no sacct)?", default=True)
    return answers


def _is_given(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is not ParameterSource.DEFAULT


def _again(read: Callable[[str], Answer]) -> Callable[[str], Answer]:
    """Return a reader of answers for click.prompt, which asks again after a UsageError."""
    def reader(answer: str) -> Answer:
        try:
            return read(answer)
        except HpcMpError as error:
            raise click.UsageError(str(error)) from None
    return reader


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
    finish(plugin("linters", "template")(template, params, project), as_json)
