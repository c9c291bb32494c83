"""``hpc-mp doctor``: problems of this machine or of a cluster; the health check for Slurm; the list of checks.

The modules of a survey are imported on demand.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import NAGIOS, weight
from hpc_mp.base.text import counted
from hpc_mp.cli.output import finish, print_findings, to_monitor
from hpc_mp.cluster.slurm.nodelist import expand

if TYPE_CHECKING:
    from hpc_mp.doctor.survey.report import Report
    from hpc_mp.doctor.survey.run import SurveyState
    from hpc_mp.doctor.survey.start import SurveyRequest

_PATH = click.Path(path_type=Path)


@click.command(help="Find the bad nodes and links of a cluster; exit 1 for a fault. In an allocation its nodes are examined; "
                    "else nodes are requested from Slurm. The system is not changed, and root is not needed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Survey N nodes and the network between them.")
@click.option("--nodelist", metavar="LIST", help="Survey these nodes: n[1-64].")
@click.option("--partition", metavar="NAME", help="Partition of the nodes.")
@click.option("--interface", "interfaces", metavar="NAME", multiple=True,
              help="Measure this network interface of every node; one per rail. Default: the interface of the node's name.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N",
              help="Measure between N GPUs of every node over NCCL, one by one, instead of TCP between interfaces.")
@click.option("--compute", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="Put every GPU, or else the processors, under load for this time per kind of work, and compare them.")
@click.option("--topology", metavar="FILE", type=_PATH, help="The switches, if Slurm does not know them.")
@click.option("--srun", default="", metavar="OPTIONS", help="More options for srun: '--account=x --reservation=y'.")
@click.option("--html", metavar="FILE", type=_PATH, help="Also write the results as a page.")
@click.option("--then-launch", metavar="JOB.toml", type=_PATH, help="Launch this job afterwards, without the bad nodes.")
def cluster(as_json: bool, nodes: int | None, nodelist: str | None, partition: str | None, interfaces: tuple[str, ...],
            gpus: int | None, compute: float | None, topology: Path | None, srun: str, html: Path | None,
            then_launch: Path | None) -> int:
    """Return the exit code: 1 if a fault was found, else the exit code of the launch, if one was requested."""
    from hpc_mp.doctor.survey.start import SurveyRequest

    if as_json and then_launch is not None:
        raise HpcMpError("--json", "would print two documents with --then-launch", "run `hpc-mp launch --json` afterwards")
    request = SurveyRequest(nodes, expand(nodelist) if nodelist else (), partition, interfaces, topology,
                            gpus or 0, compute or 0.0, tuple(shlex.split(srun)))
    report = _survey(request, as_json, html)
    if then_launch is None:
        return 0 if report.sound else 1
    from hpc_mp.cli.launch import launch_and_report
    from hpc_mp.cli.progress import TerminalListener
    from hpc_mp.launch.launch import LaunchRequest

    return launch_and_report(LaunchRequest(then_launch, wait=False), TerminalListener(aside=False))


def _survey(request: "SurveyRequest", as_json: bool, html: Path | None) -> "Report":
    """Run the survey, print it, and record the results for launch and placement. ``html``: path of a page. Raises HpcMpError if
    Slurm, a node or an interface is missing, or the page cannot be written, and RunFailed if no agent could be started."""
    from hpc_mp.doctor.survey.page import write_page
    from hpc_mp.doctor.survey.report import remember
    from hpc_mp.doctor.survey.run import run

    with _progress() as show:
        report = run(request, show)
    if as_json:
        click.echo(json.dumps(report.document()))
    else:
        _print(report)
    try:
        avoided = remember(report)
    except OSError as error:
        click.echo(f"warning: the results could not be recorded for `hpc-mp launch`: {error}", err=True)
    else:
        if avoided:
            nodes = ", ".join(finding.node for finding in avoided)
            click.echo(f"`hpc-mp launch` excludes {nodes} for a day", err=True)
    if html is not None:
        write_page(html, report)
    return report


def _print(report: "Report") -> None:
    from rich.console import Console
    from rich.markup import escape

    from hpc_mp.doctor.survey.figures import pictures
    from hpc_mp.doctor.survey.report import drain_commands

    console = Console(highlight=False, emoji=False)
    for picture in pictures(report):
        console.print(picture)
    console.print()
    for diagnosis in report.diagnoses:
        colour, doubt = ("red", "") if diagnosis.certain else ("yellow", " (suspected)")
        console.print(f"[{colour}]{escape(diagnosis.subject)}[/]  {diagnosis.code}{doubt}: {escape(diagnosis.evidence)}")
        console.print(f"→ {escape(diagnosis.remedy)}")
    print_findings([replace(noted.finding, subject=noted.who) for noted in report.noted])
    for command in drain_commands(report.diagnoses):
        console.print(escape(command), style="dim", soft_wrap=True)
    verdict = "no faults" if not report.diagnoses else f"{counted(len(report.diagnoses), 'fault')}"
    cut = "" if report.complete else " before it was interrupted"
    console.print(f"{counted(len(report.evidence.nodes), 'node')} in {report.seconds:.0f} s: {verdict}{cut}")


@contextmanager
def _progress() -> "Iterator[Callable[[str, SurveyState | None], None]]":
    """On a terminal, keep one line: the current step and the suspects. Elsewhere, print each step without a state once."""
    if not sys.stderr.isatty():
        steps: list[str] = []

        def note(step: str, state: "SurveyState | None") -> None:
            if state is None and step not in steps:
                steps.append(step)
                click.echo(step, err=True)
        yield note
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("starting") as line:
        def show(step: str, state: "SurveyState | None") -> None:
            suspects = ", ".join(diagnosis.subject for diagnosis in state.diagnoses) if state else ""
            line.update(escape(f"{step}; so far: {suspects}" if suspects else step))
        yield show


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
        from hpc_mp.doctor.nccl_log.judge import logged

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
