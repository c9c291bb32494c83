"""``hpc-mp doctor``: problems of this machine or of a cluster; the health check for Slurm; the list of checks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import NAGIOS, weight
from hpc_mp.cli.doctor_cluster import cluster
from hpc_mp.cli.output import finish, to_monitor

_PATH = click.Path(path_type=Path)
OF_CLUSTER = ("--nodes", "--nodelist", "--then-launch")
OF_NODE = ("--node", "--check", "--storage", "--nccl-log", "--root", "--commands", "--nagios")


class Doctor(click.Group):
    """A group whose options imply their sub-command: ``hpc-mp doctor`` without options examines this machine."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ("-h", "--help") or not args[0].startswith("-"))
        return super().parse_args(ctx, args if named else spelled_out(args))


def spelled_out(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the words with their sub-command. ``--list`` and ``--install DIR`` name theirs. In an allocation of several nodes,
    all are surveyed unless an option concerns this node."""
    names = {word.partition("=")[0] for word in words}
    if "--list" in names:
        return ["list", *(word for word in words if word != "--list")]
    if "--install" in names:
        return ["install", *(word.removeprefix("--install=") for word in words if word != "--install")]
    several = int(environ.get("SLURM_JOB_NUM_NODES", "1")) > 1
    if not names & set(OF_NODE) and (several or names & set(OF_CLUSTER)):
        return ["cluster", *words]
    return ["node", *(word for word in words if word != "--node")]


@click.command(cls=Doctor, help="Find problems of this machine (node, the default sub-command), or the bad nodes and links of a "
                                "cluster. The system is not changed, and root is not needed.")
@click.option("--list", "listed", is_flag=True, help="List all checks: `hpc-mp doctor list`.")
def command(listed: bool) -> None:
    """Do nothing: ``--list`` has become a sub-command before this is called."""


command.add_command(cluster)


@command.command(help="Find problems of this machine; exit 1 for an error. The system is not changed, and root is not needed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--nagios", is_flag=True,
              help="Print one line for a monitor, and exit 0 (OK), 1 (warning), 2 (error) or 3 (unknown).")
@click.option("--check", "codes", metavar="CODE", multiple=True, help="Only this check; may be repeated.")
@click.option("--all", "everything", is_flag=True, help="Show passed checks too.")
@click.option("--compute", "seconds", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="Put every GPU, or else the processors, under load for this time per kind of work, and compare them.")
@click.option("--storage", "directories", metavar="DIR", multiple=True,
              help="Also measure the speed of this directory: 256 MiB are written, read and removed.")
@click.option("--nccl-log", "logs", metavar="FILE", multiple=True, type=_PATH,
              help="Judge NCCL's choices on such a machine by its log (NCCL_DEBUG=INFO) or a directory of logs of one job.")
@click.option("--root", metavar="DIR", type=_PATH, help="Examine a recorded machine: the directory in place of /.")
@click.option("--commands", metavar="FILE", type=_PATH, help="With --root: recorded outputs of its programs, as JSON.")
def node(as_json: bool, nagios: bool, codes: tuple[str, ...], everything: bool, seconds: float | None,
         directories: tuple[str, ...], logs: tuple[Path, ...], root: Path | None, commands: Path | None) -> None:
    from hpc_mp.doctor.node import diagnose, injected, place_document

    if seconds and (root or commands):
        raise HpcMpError("--compute", "needs the machine itself, but --root is a recorded one", "leave one of them out")
    source = injected(root, commands)
    findings = diagnose(source, codes) if codes or not (directories or logs or seconds) else ()
    if seconds:
        from hpc_mp.doctor.compute import devices_here, judge, measure

        findings += tuple(judge(measure(devices_here(source), seconds, source=source)))
    if directories:
        from hpc_mp.doctor.storage import storage

        findings += tuple(storage(directories, source))
    if logs:
        from hpc_mp.doctor.nccl_log import logged

        findings += logged(logs, source)
    if nagios:
        to_monitor(findings)
    place = place_document(source)
    finish(sorted(findings, key=weight), as_json, more=place, what=str(place["host"]), everything=everything)


@command.command(help="Write the health check for Slurm's HealthCheckProgram into a directory of the node's own disk.")
@click.argument("target", metavar="DIR", type=_PATH)
@click.option("--chain", metavar="PROGRAM", help="Existing HealthCheckProgram to run as well.")
@click.option("--drain", is_flag=True, help="Let the check drain a node with an error.")
def install(target: Path, chain: str | None, drain: bool) -> None:
    from hpc_mp.doctor import install as installation

    done = installation.install(target, chain, drain)
    click.echo(f"HealthCheckProgram={done.script}\nHealthCheckInterval=60\nHealthCheckNodeState=ANY")
    message = "Add these lines to slurm.conf; the two files must be on every node, at the same path."
    if done.chained:
        message += f" The check also runs {done.chained}."
    click.echo(message, err=True)


@command.command("list", help="List all checks of a machine: their sources, and the conditions of a warning or an error.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_checks(as_json: bool) -> None:
    from hpc_mp.doctor.checks.registry import PASSIVE

    if as_json:
        rows = [{"code": check.code, "severity": check.severity, "nagios": NAGIOS[check.severity], "reads": check.reads,
                 "rule": check.rule, "remedy": check.remedy} for check in PASSIVE]
        click.echo(json.dumps({"checks": rows}))
        return
    for check in PASSIVE:
        click.echo(f"{check.code} ({check.severity})")
        click.echo(f"    reads  {check.reads}\n    rule   {check.rule}\n    remedy {check.remedy}")
    click.echo(f"{len(PASSIVE)} checks")
