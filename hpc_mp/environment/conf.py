"""NCCL's configuration files, read as NCCL reads them (``setEnvFile`` and ``initEnvFunc`` in its src/misc/param.cc, 2.30.7).

Lines are raw ``NAME=VALUE``: text around the sign, including quotes and blanks, belongs to name and value. A ``#`` starts a
comment only in the first column. A variable is never set twice, so the first of two lines wins, and a variable set by the
process, even to an empty value, hides every line.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.cluster.node.source import NodeSource

SYSTEM = "/etc/nccl.conf"
MOST_LINE = 4095  # bytes that NCCL reads at a time: the rest of a longer line becomes a separate line
MOST_TEXT = 1023  # maximum bytes of a name and of a value


@dataclass(frozen=True, slots=True)
class ConfLine:
    """A line that sets a variable.

    Attributes:
        number: the number of the line in the file, from 1.
        name, value: as NCCL sets them; bytes that are not UTF-8 as returned by ``os.fsdecode``.
        cut: True if the name or value was longer than NCCL accepts.
    """

    number: int
    name: str
    value: str
    cut: bool = False


@dataclass(frozen=True, slots=True)
class ConfFile:
    """A file that NCCL looks for.

    Attributes:
        lines: the lines in order; empty if the file does not exist.
        silent: numbers of lines that are not comments but set nothing, because ``=`` or the name is missing.
        missing: the reason why the file could not be read; None if it was read.
    """

    path: str
    lines: tuple[ConfLine, ...]
    silent: tuple[int, ...] = ()
    missing: str | None = None


def user_path(environ: Mapping[str, str]) -> str | None:
    """Return the user file: ``NCCL_CONF_FILE`` (since 2.23) if not empty, even if no such file exists, else ``~/.nccl.conf``."""
    named = environ.get("NCCL_CONF_FILE")
    if named:
        return os.path.abspath(named)
    return f"{environ['HOME']}/.nccl.conf" if "HOME" in environ else None


def nccl_files(source: NodeSource, environ: Mapping[str, str]) -> tuple[ConfFile, ...]:
    """Return NCCL's own files, the system's last."""
    user = user_path(environ)
    return (*([] if user is None else [read_file(source, user)]), read_file(source, SYSTEM))


def read_file(source: NodeSource, path: str) -> ConfFile:
    try:
        data = source.path(path).read_bytes()
    except OSError as error:
        return ConfFile(path, (), missing=error.strerror)
    lines, silent = read_lines(data)
    return ConfFile(path, lines, silent)


def read_lines(data: bytes) -> tuple[tuple[ConfLine, ...], tuple[int, ...]]:
    """Return (lines that set a variable, numbers of lines that should but do not)."""
    lines, silent, number = [], [], 1
    for piece in _pieces(data):
        text = piece.partition(b"\0")[0].removesuffix(b"\n").removesuffix(b"\r")
        name, sign, value = text.partition(b"=")
        if not text.startswith(b"#"):
            if sign and name:
                cut = max(len(name), len(value)) > MOST_TEXT or len(piece) == MOST_LINE
                lines.append(ConfLine(number, os.fsdecode(name[:MOST_TEXT]), os.fsdecode(value[:MOST_TEXT]), cut))
            elif text.strip():
                silent.append(number)
        number += piece.endswith(b"\n")
    return tuple(lines), tuple(silent)


def _pieces(data: bytes) -> list[bytes]:
    """Split data into pieces as C's fgets does."""
    lines = io.BytesIO(data)
    return list(iter(lambda: lines.readline(MOST_LINE), b""))
