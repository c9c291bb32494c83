"""``hpc-mp doctor``: what is wrong with this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import weight
from hpc_mp.cli.doctor_cluster import answer, asked, cluster_options
from hpc_mp.cli.output import finish
from hpc_mp.doctor.compute import devices_here, judge, measure
from hpc_mp.doctor.install import install
from hpc_mp.doctor.nccl_log import logged
from hpc_mp.doctor.node import against, diagnose, injected, place_document
from hpc_mp.doctor.storage import storage

_PATH = click.Path(path_type=Path)


@click.command(help="Find what is wrong with this machine; exit 1 if something is. Nothing is changed, root is not needed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--node", is_flag=True, help="Look at this machine alone, inside of an allocation too.")
@click.option("--check", "codes", metavar="CODE", multiple=True, help="Only this check; may be given several times.")
@click.option("--all", "everything", is_flag=True, help="Show what is well, too.")
@click.option("--storage", "directories", metavar="DIR", multiple=True,
              help="Also measure how fast this directory is: 256 MiB are written and read, nothing is left.")
@click.option("--nccl-log", "logs", metavar="FILE", multiple=True, type=_PATH,
              help="Judge what NCCL did on such a machine, by its log (NCCL_DEBUG=INFO) or a directory of logs of one job.")
@click.option("--against", "host", metavar="FILE", type=_PATH,
              help="Inside of a container: compare with what --json said on its host.")
@click.option("--install", "target", metavar="DIR", type=_PATH,
              help="Write the health check for Slurm's HealthCheckProgram into a directory of the node's own disk.")
@click.option("--chain", metavar="PROGRAM", help="With --install: the HealthCheckProgram that goes on running beside ours.")
@click.option("--drain", is_flag=True, help="With --install: the check has Slurm drain a node with an error.")
@click.option("--root", metavar="DIR", type=_PATH, help="Look at a recorded machine: what stands for /.")
@click.option("--commands", metavar="FILE", type=_PATH, help="With --root: what its programs answered, as JSON.")
@cluster_options
def command(as_json: bool, node: bool, codes: tuple[str, ...], everything: bool, directories: tuple[str, ...],
            logs: tuple[Path, ...], host: Path | None, target: Path | None, chain: str | None, drain: bool, root: Path | None,
            commands: Path | None, **cluster: Any) -> int:
    if target is not None:
        _install(target, chain, drain)
        return 0
    if not (node or codes or directories or logs or host or root or commands) and asked(cluster):
        return answer(as_json, **cluster)
    if (seconds := cluster["compute"]) and (root or commands):
        raise HpcMpError("--compute", "needs the machine itself, and --root is a recorded one", "leave one of them out")
    source = injected(root, commands)
    findings = diagnose(source, codes) if codes or not (directories or logs or host or seconds) else ()
    findings += tuple(judge(measure(devices_here(source), seconds, source=source))) if seconds else ()
    findings += tuple(storage(directories, source)) if directories else ()
    findings += logged(logs, source) if logs else ()
    findings += against(host, source) if host else ()
    place = place_document(source)
    finish(sorted(findings, key=weight), as_json, more=place, what=str(place["host"]), everything=everything)
    return 0


def _install(target: Path, chain: str | None, drain: bool) -> None:
    done = install(target, chain, drain)
    click.echo(f"HealthCheckProgram={done.script}\nHealthCheckInterval=60\nHealthCheckNodeState=ANY")
    words = "They go into slurm.conf; the two files must be on every node, in the same place."
    if done.chained:
        words += f" {done.chained} goes on running, called by ours."
    click.echo(words, err=True)
