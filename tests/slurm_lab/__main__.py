"""A lab by hand. `up` stays in the foreground; the other commands act on the lab that SLURM_CONF names."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import click

from .lab import Cluster, Lab
from .why_not import why_not


def running() -> Cluster:
    """Return the lab of this shell."""
    if "SLURM_CONF" not in os.environ:
        raise click.ClickException("no lab is named: first run the export line that `up` printed")
    return Cluster(Path(os.environ["SLURM_CONF"]).parents[1])


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    pass


@main.command()
@click.option("--nodes", default=4, show_default=True, help="Hosts n1 … nN, 4 CPUs each.")
@click.option("--accounting", is_flag=True, help="With slurmdbd and MariaDB; the account is acc.")
@click.option("--gpus", default=0, show_default=True, help="Pretended GPUs per node.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="A line of slurm.conf to add or replace.")
@click.option("--chroot", type=click.Path(path_type=Path), help="Live in this system's newer Slurm (see chroot.py).")
def up(nodes: int, accounting: bool, gpus: int, overrides: tuple[str, ...], chroot: Path | None) -> None:
    """Start a lab; it ends with Ctrl-C, SIGTERM, or the end of standard input."""
    if reason := why_not(accounting):
        raise click.ClickException(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    settings = dict(line.split("=", 1) for line in overrides)
    with Lab(nodes, accounting=accounting, gpus=gpus, overrides=settings, chroot=chroot) as lab:
        print(f"export SLURM_CONF={lab.environ['SLURM_CONF']}\nexport LAB_SHARE={lab.share}", flush=True)
        try:
            sys.stdin.read()
        except KeyboardInterrupt:
            print("ending", file=sys.stderr)


@main.command()
@click.argument("node")
def kill(node: str) -> None:
    """End all processes of a node at once."""
    running().kill(node)


@main.command()
@click.argument("node")
def boot(node: str) -> None:
    """Start a node that was killed."""
    running().boot(node)


@main.command()
@click.argument("node")
@click.argument("state", type=click.Choice(["up", "down"]))
def link(node: str, state: str) -> None:
    """Pull a node's cable, or put it back."""
    running().link(node, state == "up")


@main.command()
@click.argument("rate")
@click.argument("nodes", nargs=-1)
def shape(rate: str, nodes: tuple[str, ...]) -> None:
    """Limit nodes (default: all), each way, to a rate such as 200mbit."""
    running().shape(rate, nodes)


@main.command()
def unshape() -> None:
    """Take every limit away."""
    running().unshape()


@main.command()
def mend() -> None:
    """No jobs, every node up, every link whole."""
    running().mend()


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("node")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def at(node: str, command: tuple[str, ...]) -> None:
    """Run a command inside a node, as root."""
    result = running().at(node, command)
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    sys.exit(result.returncode)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--user", help="An ordinary user: nobody.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(user: str | None, command: tuple[str, ...]) -> None:
    """Run a command on the submit host."""
    sys.exit(running().popen(command, user=user, cwd=Path.cwd()).wait())


if __name__ == "__main__":
    main()
