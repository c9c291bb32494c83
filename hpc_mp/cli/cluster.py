"""``hpc-mp cluster``: what a Slurm cluster is, and its switches; and one on this machine."""

from __future__ import annotations

import click

from hpc_mp.cli.cluster_describe import describe
from hpc_mp.cli.cluster_render import render
from hpc_mp.cli.cluster_topology import topology
from hpc_mp.cli.lab import at, boot, kill, link, shape, status
from hpc_mp.cli.lab_up import down, up


@click.group(help="Describe a Slurm cluster; read, write and check its switches (nothing is changed). Or have one on this "
                  "machine: up, status, shape, link, kill, boot, at, down.")
def command() -> None:
    pass


command.add_command(describe)
command.add_command(render)
command.add_command(topology)
for each in (up, status, shape, link, kill, boot, at, down):
    command.add_command(each)
