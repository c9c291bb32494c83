"""``hpc-mp cloud render`` for AWS and Google Cloud: the configuration of a cluster, from the name of a machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from hpc_mp.clouds import CLOUDS, FIELDS, ClusterRequest, ClusterSummary, check, find_machine, summarise, usual_scratch, write
from hpc_mp.clouds import render as rendered


def _cloud_options(function: Callable[..., None]) -> Callable[..., None]:
    """An option of the command line for each of the clouds' own."""
    for name, field in reversed(list(FIELDS.items())):
        clouds = " and ".join(CLOUDS[cloud] for cloud in field.patterns)
        needed = "needed" if set(field.needed) == set(field.patterns) else "may be left out"
        words = f"{clouds}, {needed}: {field.words}."
        function = click.option(f"--{name}", name.replace("-", "_"), metavar="TEXT", help=words)(function)
    return function


@click.command(help="Write the configuration of a Slurm cluster on AWS (ParallelCluster) or Google Cloud (Cluster Toolkit), the "
                    "scripts that install hpc-mp and its doctor, and the commands to type next. The machine's name says the "
                    "cloud. Nobody is asked and nothing is created but files.")
@click.option("--sku", required=True, help="The machine, such as p5.48xlarge or a3-ultragpu-8g.")
@click.option("--nodes", type=int, required=True, help="How many of them.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="A new directory [default: the cluster's name].")
@click.option("--name", default="hpc-mp", show_default=True, help="Of the cluster.")
@click.option("--partition", help="Of Slurm [default: gpu, or cpu].")
@click.option("--capacity", type=click.Choice(["on-demand", "spot", "block", "flex"]), default="on-demand", show_default=True,
              help="How the machines are paid for: block is AWS' Capacity Block, flex Google's Flex Start.")
@click.option("--scratch-gib", type=click.IntRange(min=0), metavar="GIB",
              help="Of the parallel file system, 0: none [default: 4800 on AWS, 36000 on Google Cloud; none for CPU machines].")
@_cloud_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def render_others(sku: str, nodes: int, output: Path | None, name: str, partition: str | None, capacity: str,
                  scratch_gib: int | None, as_json: bool, **options: str | None) -> None:
    size = find_machine(sku)
    request = ClusterRequest(size, nodes, name, partition or ("gpu" if size.gpus else "cpu"), capacity,
                usual_scratch(size) if scratch_gib is None else scratch_gib,
                {key.replace("_", "-"): value for key, value in options.items() if value is not None})
    check(request)
    directory, files, found = output or Path(name), rendered(request), summarise(request)
    write(directory, files)
    if as_json:
        click.echo(json.dumps({"directory": str(directory.absolute()), "files": sorted(files)} | found.document()))
    else:
        _print(found, directory, list(files))


def _print(found: ClusterSummary, directory: Path, files: list[str]) -> None:
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    gpus = f"{found.gpus} × {found.gpu_model}" if found.gpus else "none"
    network = f"{found.adapters} × {found.network} of {found.adapter_gbps} Gb/s" if found.adapters else found.network
    quotas = "; ".join(f"{quota.needed} {'vCPUs' if quota.unit == 'vcpus' else 'GPUs'} of \"{quota.name}\""
                       + (f" ({quota.code})" if quota.code else "") for quota in found.quotas)
    unnamed = ("none counts for a Capacity Block" if found.capacity == "block" else
               f"{found.needs}; the catalogue names no quota for {found.capacity} capacity")
    rows = {
        "cluster": f"{found.nodes} × {found.sku}, {found.tool}, {found.capacity}",
        "partition": f"{found.partition}: {found.node_names}",
        "GPUs": f"{gpus} per node" + (f", GRES {found.gres}" if found.gres else ""),
        "network": f"{network} per node" + (", placed close together" if found.placement_group else ""),
        "node": f"{found.vcpus} vCPUs, {found.memory_gib} GiB",
        "expected": found.busbw if found.gpus else "",
        "profile": f"{found.profile} (hpc-mp env --profile {found.profile})",
        "quota": f"{quotas or unnamed}. A quota is a permission, not capacity.",
    }
    for head, text in rows.items():
        if text:
            console.print(f"{head:<11}{escape(text)}")
    console.print(f"\nIn a job file:\n\n{escape(found.job)}")
    console.print(f"Wrote {escape(', '.join(files))} to {escape(str(directory))}. The commands are in "
                  f"{escape(str(directory / 'NEXT-STEPS.md'))}.")
