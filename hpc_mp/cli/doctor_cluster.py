"""``hpc-mp doctor cluster``: a survey of many nodes and the network between them; its modules are imported on demand."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted
from hpc_mp.cli.output import print_findings
from hpc_mp.cluster.slurm.nodelist import expand

if TYPE_CHECKING:
    from hpc_mp.doctor.survey.procedure import SurveyState
    from hpc_mp.doctor.survey.report import Report
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


def _survey(request: SurveyRequest, as_json: bool, html: Path | None) -> Report:
    """Run the survey, print it, and record the results for launch and placement. ``html``: path of a page.

    Raises:
        HpcMpError: Slurm, a node or an interface is missing; the page cannot be written.
        RunFailed: no agent could be started.
    """
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


def _print(report: Report) -> None:
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
    console.print(f"{len(report.evidence.nodes)} nodes in {report.seconds:.0f} s: {verdict}{cut}")


@contextmanager
def _progress() -> Iterator[Callable[[str, SurveyState | None], None]]:
    """On a terminal, keep one line: the current step and the suspects. Elsewhere, print each step without a state once."""
    if not sys.stderr.isatty():
        steps: list[str] = []

        def note(step: str, state: SurveyState | None) -> None:
            if state is None and step not in steps:
                steps.append(step)
                click.echo(step, err=True)
        yield note
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("starting") as line:
        def show(step: str, state: SurveyState | None) -> None:
            suspects = ", ".join(diagnosis.subject for diagnosis in state.diagnoses) if state else ""
            line.update(escape(f"{step}; so far: {suspects}" if suspects else step))
        yield show
