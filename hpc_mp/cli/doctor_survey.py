"""A survey of many nodes and the network between them, as ``hpc-mp doctor`` shows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from hpc_mp.cli.output import print_findings
from hpc_mp.doctor.survey.actions import drain_commands, remember
from hpc_mp.doctor.survey.page import write_page
from hpc_mp.doctor.survey.procedure import SurveyState
from hpc_mp.doctor.survey.report import Report
from hpc_mp.doctor.survey.run import Show, run
from hpc_mp.doctor.survey.start import SurveyRequest
from hpc_mp.doctor.survey.terminal import pictures


def survey(wish: SurveyRequest, as_json: bool, html: Path | None) -> Report:
    """Survey, print, and leave what launch and placement read. ``html``: a page is written there.

    Raises:
        HpcMpError: no Slurm, no nodes, no such interface; the page cannot be written.
        RunFailed: no agent could be started.
    """
    with _progress() as show:
        report = run(wish, show)
    if as_json:
        click.echo(json.dumps(report.document()))
    else:
        _print(report)
    try:
        avoided = remember(report)
    except OSError as error:
        click.echo(f"warning: `hpc-mp launch` will not know of it: {error}", err=True)
    else:
        if avoided:
            words = ", ".join(finding.node for finding in avoided)
            click.echo(f"`hpc-mp launch` leaves out {words} for a day", err=True)
    if html is not None:
        write_page(html, report)
    return report


def _print(report: Report) -> None:
    console = Console(highlight=False, emoji=False)
    for picture in pictures(report):
        console.print(picture)
    console.print()
    for found in report.diagnoses:
        colour, doubt = ("red", "") if found.certain else ("yellow", " (suspected)")
        console.print(f"[{colour}]{escape(found.subject)}[/]  {found.code}{doubt}: {escape(found.evidence)}")
        console.print(f"→ {escape(found.remedy)}")
    print_findings([replace(noted.finding, subject=noted.who) for noted in report.noted])
    for command in drain_commands(report.diagnoses):
        console.print(escape(command), style="dim", soft_wrap=True)
    verdict = "no fault found" if not report.diagnoses else f"{len(report.diagnoses)} found"
    cut = "" if report.complete else " before it was interrupted"
    console.print(f"{len(report.evidence.nodes)} nodes in {report.seconds:.0f} s: {verdict}{cut}")


@contextmanager
def _progress() -> Iterator[Show]:
    """One line on a terminal: what is being done, and who is suspected by now."""
    if not sys.stderr.isatty():
        yield lambda _step, _state: None
        return
    with Console(stderr=True).status("starting") as line:
        def show(step: str, state: SurveyState | None) -> None:
            named = ", ".join(found.subject for found in state.diagnoses) if state else ""
            line.update(escape(f"{step}; by now: {named}" if named else step))
        yield show
