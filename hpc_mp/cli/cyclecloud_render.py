"""``hpc-mp cyclecloud render``: a size and a number of nodes become a directory that CycleCloud takes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click
from click.core import ParameterSource

from hpc_mp.cyclecloud.catalogue import Catalogue, load_catalogue
from hpc_mp.cyclecloud.render import Choices, Storage, choices_within, find_size, settle, sizes_on_offer, told, words, write
from hpc_mp.errors import HpcMpError


@click.command(help="Write a directory that CycleCloud takes: a project, a Slurm template and the parameters for so many "
                    "machines of a size. Says what quota it needs, and what a job will see. Nothing is started, and nothing "
                    "is asked of Azure.")
@click.option("--sku", metavar="SIZE", help="Size of the nodes that train, such as Standard_ND96isr_H100_v5.")
@click.option("--nodes", type=int, metavar="N", help="How many of them there may be.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR",
              help="The directory to write [default: the cluster's name].")
@click.option("--name", default="hpc-mp", show_default=True, help="Of the cluster; nodes are named after it.")
@click.option("--region", help="As Azure names it, such as westeurope. Left out: chosen in CycleCloud's form.")
@click.option("--subnet", metavar="GROUP/NETWORK/SUBNET", help="Left out: chosen in CycleCloud's form.")
@click.option("--credentials", help="The account in CycleCloud. Left out: chosen in its form.")
@click.option("--image", metavar="URN|ID", help="Of the nodes that train [default: an HPC image that fits the size].")
@click.option("--storage", type=click.Choice(get_args(Storage)), default="nfs", show_default=True,
              help="/shared is a disk of the scheduler (nfs), or another NFS server (external); amlfs: Azure Managed Lustre at "
                   "/data beside that disk.")
@click.option("--storage-address", metavar="HOST[:/PATH]", help="Of the NFS server or of Lustre.")
@click.option("--accounting/--no-accounting", default=True, show_default=True,
              help="Keep accounts of jobs; that needs a MySQL server.")
@click.option("--database", metavar="HOST", help="That server.")
@click.option("--database-user", metavar="NAME", help="Its user; the password is typed into CycleCloud's form.")
@click.option("--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Of hpc-mp, for the cluster to install [default: it asks pip's index].")
@click.option("--login-nodes", type=int, default=1, show_default=True, help="0: users log in to the scheduler.")
@click.option("--htc-nodes", type=int, default=8, show_default=True, help="Most CPU nodes for work on one machine.")
@click.option("--workspace", "as_workspace", is_flag=True,
              help="From an empty subscription: parameters for Azure CycleCloud Workspace for Slurm too.")
@click.option("--resource-group", metavar="NAME", help="Of the workspace [default: the cluster's name and -rg].")
@click.option("--project-url", metavar="URL",
              help="A GitHub release of the project, whose specs the workspace's own cluster gets too.")
@click.option("--json", "json_", is_flag=True, help="Print one JSON document.")
def render_command(sku: str | None, nodes: int | None, output: Path | None, as_workspace: bool, resource_group: str | None,
                   project_url: str | None, wheel: Path | None, json_: bool, **given: object) -> None:
    catalogue = load_catalogue()
    if sku is None or nodes is None:
        _refuse_without_terminal(sku, nodes, quiet=json_)
        sku, nodes, asked = _asked(sku, nodes, catalogue)
        source = click.get_current_context().get_parameter_source
        given |= {name: value for name, value in asked.items() if source(name) is ParameterSource.DEFAULT}
    choices = Choices(sku=sku, nodes=nodes, **given)  # type: ignore[arg-type]  # each option above is a field of that type
    workspace = None
    if as_workspace:
        choices, workspace = choices_within(choices, resource_group, project_url)
    elif resource_group or project_url:
        option = "--resource-group" if resource_group else "--project-url"
        raise HpcMpError(option, "counts with --workspace only", "give --workspace, or leave it out")
    plan = settle(choices, catalogue)
    found = told(plan, catalogue)
    directory = output or Path(choices.name)
    written = write(directory, plan, found, workspace, wheel)
    if json_:
        click.echo(json.dumps({"directory": str(directory), "files": [str(path) for path in written], **asdict(found)}))
        return
    click.echo("\n".join(words(found)))
    click.echo(f"\nwrote {directory}; {directory / 'README.txt'} says how to go on")


def _refuse_without_terminal(sku: str | None, nodes: int | None, *, quiet: bool) -> None:
    missing = [option for option, value in (("--sku", sku), ("--nodes", nodes)) if value is None]
    if quiet or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise HpcMpError(" and ".join(missing), "missing, and there is no terminal to ask on",
                         "give --sku SIZE and --nodes N, such as --sku Standard_ND96isr_H100_v5 --nodes 4")


def _asked(sku: str | None, nodes: int | None, catalogue: Catalogue) -> tuple[str, int, dict[str, object]]:
    """The size, the number, and what else somebody who gave no options may want to say."""
    def known(name: str) -> str:
        try:
            return find_size(name, catalogue).name
        except HpcMpError as error:
            raise click.UsageError(str(error)) from None  # asked again

    if sku is None:
        for size in sizes_on_offer(catalogue):
            if size.gpus and size.rdma:
                click.echo(f"  {size.name:32} {size.gpus} × {size.gpu_model}, {size.nics} × InfiniBand {size.rdma_gbps} Gb/s")
        click.echo("  Standard_D8ads_v5                CPU, to try things out; other sizes: cyclecloud/catalogue.toml")
        sku = click.prompt("Size of the nodes that train", default="Standard_ND96isr_H100_v5", value_proc=known)
    if nodes is None:
        nodes = click.prompt("How many of them at most (they start when jobs wait for them)", type=click.IntRange(1), default=2)
    region = click.prompt("Region, such as westeurope (empty: chosen in CycleCloud's form)", default="", show_default=False)
    accounting = click.confirm("Is there a MySQL server to keep accounts of jobs in (else there is no sacct)?", default=True)
    return sku, nodes, {"region": region or None, "accounting": accounting}
