"""``hpc-mp cloud render`` for Azure: a directory for CycleCloud from a size and a number of nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar, get_args

import click
from click.core import ParameterSource

from hpc_mp.base.errors import HpcMpError
from hpc_mp.clouds.azure.offer import Offer, load_offer
from hpc_mp.clouds.azure.render import (
    SERVER,
    Choices,
    Storage,
    azure_summary,
    choices_within,
    find_size,
    refuse_full,
    settle,
    sizes_on_offer,
    words,
    write,
)

Answer = TypeVar("Answer")


@click.command(help="Write a directory for CycleCloud: a project, a Slurm template and the parameters for a number of machines "
                    "of one size. Prints the required quota, and the resources of a job. Without --sku or --nodes, the missing "
                    "values are asked for on the terminal. No machine is started, and Azure is not contacted.")
@click.option("--sku", metavar="SIZE", help="Size of the training nodes, such as Standard_ND96isr_H100_v5.")
@click.option("--nodes", type=int, metavar="N", help="Maximum number of training nodes.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR",
              help="Directory to write [default: the cluster's name].")
@click.option("--name", default="hpc-mp", show_default=True, help="Name of the cluster, and prefix of its nodes' names.")
@click.option("--region", help="Azure region, such as westeurope [default: chosen in CycleCloud's form].")
@click.option("--subnet", metavar="GROUP/NETWORK/SUBNET", help="Subnet of the nodes [default: chosen in CycleCloud's form].")
@click.option("--credentials", help="Account in CycleCloud [default: chosen in its form].")
@click.option("--image", metavar="URN|ID", help="Image of the training nodes [default: an HPC image that fits the size].")
@click.option("--storage", type=click.Choice(get_args(Storage)), default="nfs", show_default=True,
              help="/shared is a disk of the scheduler (nfs), or another NFS server (external); amlfs adds Azure Managed Lustre "
                   "at /data to the disk.")
@click.option("--storage-address", metavar="HOST[:/PATH]", help="Address of the NFS server or of Lustre.")
@click.option("--accounting/--no-accounting", default=True, show_default=True,
              help="Accounting of jobs; needs a MySQL server.")
@click.option("--database", metavar="HOST", help="The MySQL server.")
@click.option("--database-user", metavar="NAME", help="User on the MySQL server; enter the password in CycleCloud's form.")
@click.option("--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Wheel of hpc-mp to install on the cluster [default: from pip's index].")
@click.option("--login-nodes", type=int, default=1, show_default=True,
              help="Number of login nodes; 0: users log in to the scheduler.")
@click.option("--htc-nodes", type=int, default=8, show_default=True, help="Maximum number of CPU nodes for single-node work.")
@click.option("--workspace", "as_workspace", is_flag=True,
              help="For an empty subscription: also write parameters for Azure CycleCloud Workspace for Slurm.")
@click.option("--resource-group", metavar="NAME", help="Resource group of the workspace [default: the cluster's name and -rg].")
@click.option("--project-url", metavar="URL",
              help="GitHub release of the project with the specs for the workspace's own cluster.")
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
        raise HpcMpError(option, "has an effect only with --workspace", "add --workspace, or leave it out")
    plan = settle(choices, offer)
    summary = azure_summary(plan, offer, SERVER if workspace else None)
    written = write(directory, plan, summary, workspace, wheel)
    if json_:
        click.echo(json.dumps({"directory": str(directory), "files": [str(path) for path in written], **asdict(summary)}))
        return
    click.echo("\n".join(words(summary)))
    click.echo(f"\nwrote {directory}; see {directory / 'README.txt'} for the next steps")


def _refuse_without_terminal(sku: str | None, nodes: int | None, *, quiet: bool) -> None:
    missing = [option for option, value in (("--sku", sku), ("--nodes", nodes)) if value is None]
    if quiet or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise HpcMpError(" and ".join(missing), "missing, and standard input is not a terminal",
                         "pass --sku SIZE and --nodes N, such as --sku Standard_ND96isr_H100_v5 --nodes 4")


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
        nodes = click.prompt("Maximum number of training nodes (they start when jobs wait for them)",
                             default="1" if size.twin else str(size.nvlink_block or 2),
                             value_proc=_again(lambda answer: _number(answer, size.name, offer)))
    return size.name, nodes


def _number(answer: str, sku: str, offer: Offer) -> int:
    if not answer.strip().isdecimal():
        raise HpcMpError(answer, "is not a number of machines", "enter the maximum number of machines of the cluster")
    return settle(Choices(sku, int(answer)), offer).choices.nodes


def _asked_workspace() -> bool:
    """Ask if parameters must be written for a workspace. Return False, without a question, if an option settles it."""
    if any(map(_is_given, ("as_workspace", "subnet", "credentials"))):
        return False
    return not click.confirm("Do you have a CycleCloud server (else parameters are written for a workspace, which creates one)?",
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
            "Do you have a MySQL server for the accounting of jobs (else without sacct)?", default=True)
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
