"""``hpc-mp cluster``: what a Slurm cluster is, and its switches."""

from __future__ import annotations

import click

from hpc_mp.cli.cluster_describe import describe
from hpc_mp.cli.cluster_render import render
from hpc_mp.cli.cluster_topology import topology


@click.group(help="Describe a Slurm cluster; read, write and check its switches. Nothing is changed.")
def command() -> None:
    pass


command.add_command(describe)
command.add_command(render)
command.add_command(topology)
