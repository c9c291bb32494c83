"""Output of verbs: findings in one common form, new files, and streams that outlive their readers: a run must survive the end
of its pager or terminal."""

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import Finding, Severity, findings_document, nagios_line, summary, worst
from hpc_mp.base.text import escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLOURS: dict[Severity, str] = {"error": "red", "warning": "yellow", "unknown": "magenta", "info": "cyan", "ok": "green"}
GONE = (errno.EPIPE, errno.EIO)  # the reader of the pipe has ended; the terminal was closed


def finish(findings: Sequence[Finding], as_json: bool, *, more: Mapping[str, Any] | None = None, what: str = "",
           everything: bool = True) -> None:
    """Print the findings of a linter or a check, and the count of each severity; exit 1 for an error. ``more``: further entries
    of the JSON document, such as the host. ``what``: the examined object, printed before the counts. ``everything``: True to
    print findings of severity ``ok`` too."""
    if as_json:
        click.echo(json.dumps({**(more or {}), **findings_document(findings)}))
    else:
        print_findings([finding for finding in findings if everything or finding.severity != "ok"])
        click.echo((f"{what}: " if what else "") + (summary(findings) or "no findings"))
    exit_by(findings)


def write_new(path: Path, text: str, force: bool) -> None:
    """Write a file; replace an existing one only if ``force``. Raises HpcMpError."""
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise HpcMpError(str(path), "exists", "pass another name, or --force to replace it") from None
    except OSError as error:
        raise HpcMpError(str(path), f"cannot be written ({error.strerror})", "pass a path in a writable directory") from None


def exit_by(findings: Sequence[Finding]) -> None:
    """Exit 1 if one of them is an error."""
    if worst(findings) == "error":
        raise click.exceptions.Exit(1)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print each finding as ``FILE:LINE: severity CODE subject: message``, with its fix on the next line."""
    from rich.markup import escape

    console = terminal()
    for finding in findings:
        where = f"{finding.file}:{finding.line}: " if finding.line else f"{finding.file}: " if finding.file else ""
        about = f"{finding.subject}: " if finding.subject and finding.subject not in finding.message else ""
        fix = f"\n    → {_one_line(finding.fix)}" if finding.fix else ""
        severity = f"[{COLOURS[finding.severity]}]{finding.severity}[/]"
        console.print(f"{escape(where)}{severity} {finding.code} {escape(_one_line(about + finding.message))}{escape(fix)}")


def terminal() -> "Console":
    """Return standard output, coloured on a terminal. Lines are never wrapped, not even in a pipe."""
    from rich.console import Console

    return Console(highlight=False, emoji=False, soft_wrap=True)


def number_table(*columns: str, words: Sequence[str] = ()) -> "Table":
    """Return a table of numbers, aligned right, except the first column and ``words``."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column in words else "right", no_wrap=True)
    return table


@contextmanager
def bytes_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows the bytes done and in all as a bar, if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(title, BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console, transient=True,
                  disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def short_path(path: Path) -> str:
    """Return the path relative to the current directory if it is below it."""
    cwd = Path.cwd()
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def _one_line(text: str) -> str:
    """Return a message on one line: it quotes foreign text, which must neither break the line nor control the terminal."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def to_monitor(findings: Sequence[Finding]) -> None:
    """Print one line and exit with the code of a Nagios plug-in."""
    click.echo(nagios_line(findings))
    raise click.exceptions.Exit(findings_document(findings)["nagios"])


class Lasting(io.FileIO):
    """An open descriptor that accepts any output. ``lost``: the first reason for dropped output; None without one. ``written``:
    the number of bytes passed to it."""

    lost: OSError | None = None
    written: int = 0

    def write(self, data: Any, /) -> int:
        self.written += memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.lost = self.lost or error
            return memoryview(data).nbytes

    @property
    def incomplete(self) -> str | None:
        """The reason why an active reader has not received everything (for example a full disk); None if all is well."""
        return self.lost.strerror if self.lost is not None and self.lost.errno not in GONE else None


@contextmanager
def lasting_output() -> Iterator[Lasting]:
    """Replace standard output (whose descriptor is yielded) and standard error by streams that accept any output."""
    out, error = (_descriptor(stream) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(_text(out, sys.stdout)), redirect_stderr(_text(error, sys.stderr)):
        yield out


def _descriptor(stream: TextIO | None) -> Lasting:
    """Return the descriptor of ``stream``. A stream closed at the start (``>&-``) becomes /dev/null, with its number."""
    return Lasting(stream.fileno() if stream else os.open(os.devnull, os.O_WRONLY), "w", closefd=False)


def _text(raw: Lasting, like: TextIO | None) -> io.TextIOWrapper:
    """Return a text stream with the encoding of ``like``; characters that it lacks are written as question marks."""
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=like.encoding if like else "utf-8", errors="replace",
                            line_buffering=True)
