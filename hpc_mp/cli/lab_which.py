"""Which cluster of this machine a command means, and whether it may."""

from __future__ import annotations

import os
import shlex
import sys

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.lab import keeper
from hpc_mp.lab.cluster import Cluster

SBIN = "/usr/local/sbin:/usr/sbin:/sbin"

name_option = click.option("--name", help="Of the cluster, where several are up.")


def chosen(name: str | None) -> Cluster:
    """The cluster of that name, or the only one."""
    running = keeper.names()
    if name is None and len(running) > 1:
        raise HpcMpError("hpc-mp cluster", f"{len(running)} clusters are up: {', '.join(running)}", "say which with --name")
    if not running or name not in (None, *running):
        value = "hpc-mp cluster" if name is None else f"--name {name}"
        others = f"up: {', '.join(running)}; or s" if running else "s"
        raise HpcMpError(value, "no such cluster is up" if name else "no cluster is up",
                         f"{others}tart one: `{mine('cluster', 'up', *(('--name', name) if name else ()))}`")
    return Cluster(keeper.directory_of(name or running[0]))


def need_root() -> None:
    """HpcMpError with the whole command for sudo, which looks for programs in directories of its own."""
    if os.geteuid() != 0:
        raise HpcMpError("hpc-mp cluster", "makes namespaces and network interfaces, and only root may touch them",
                         f"type `{mine(*sys.argv[1:])}`")
    os.environ["PATH"] = f"{os.environ.get('PATH', '/usr/bin:/bin')}:{SBIN}"  # a plain `su` brings a PATH without daemons


def mine(*arguments: str) -> str:
    """A command of this hpc-mp as one would type it, with its full path, through sudo."""
    program = os.path.abspath(sys.argv[0])
    start = [sys.executable, "-m", "hpc_mp"] if program.endswith("__main__.py") else [program]
    return shlex.join(["sudo", *start, *arguments])
