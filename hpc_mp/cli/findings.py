"""What linters of files found, said on the terminal or as JSON; and the files that they read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape

from hpc_mp.base.errors import HpcMpError
from hpc_mp.environment.rule import Severity

if TYPE_CHECKING:
    from hpc_mp.clouds.azure import Finding as TemplateFinding
    from hpc_mp.lint.sbatch import Finding as ScriptFinding

COLOURS: dict[Severity, str] = {"error": "red", "warning": "yellow", "info": "cyan"}


def text_of(file: Path, kind: str) -> str:
    """The file with its own line ends; bytes that are no UTF-8 stay visible as replacement characters.

    Raises:
        HpcMpError: it cannot be read; name a ``kind`` of file.
    """
    try:
        return file.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise HpcMpError(str(file), f"cannot be read ({error.strerror})", f"name a {kind}") from None


def tell(findings: Sequence[ScriptFinding | TemplateFinding], file: Path, as_json: bool) -> None:
    """Print them; Exit 1 if one is an error. ``file``: where those are that name none."""
    if as_json:
        click.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        _print(findings, file)
    if any(finding.severity == "error" for finding in findings):
        raise click.exceptions.Exit(1)


def _print(findings: Sequence[ScriptFinding | TemplateFinding], file: Path) -> None:
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    for each in findings:
        where = escape(str(getattr(each, "file", file)))
        severity = f"[{COLOURS[each.severity]}]{each.severity}[/]"
        console.print(f"{where}:{each.line}: {severity} {each.code} {escape(each.message)}\n    → {escape(each.fix)}")
    counts = Counter(finding.severity for finding in findings)
    console.print(", ".join(f"{counts[severity]} {severity}" + "s" * (severity != "info" and counts[severity] != 1)
                            for severity in COLOURS if counts[severity]) or "Nothing found.")
