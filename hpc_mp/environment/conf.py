"""NCCL's files of settings, read as NCCL reads them (``setEnvFile`` and ``initEnvFunc`` in its src/misc/param.cc, 2.30.7).

Raw ``NAME=VALUE`` lines: what stands around the sign belongs to name and value, quotes and blanks too. A ``#`` counts in the
first column only. What is set already is never set again, so the first of two lines wins, and a variable that the process has
set, be it to nothing, hides every line.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.cluster.node.source import NodeSource

SYSTEM = "/etc/nccl.conf"
MOST_LINE = 4095  # bytes that NCCL takes at a time: the rest of a longer line is a line of its own
MOST_TEXT = 1023  # bytes of a name, and of a value


@dataclass(frozen=True, slots=True)
class ConfLine:
    """A line that sets something.

    Attributes:
        number: of the line in the file, from 1.
        name, value: as NCCL sets them; bytes that are no UTF-8 as ``os.fsdecode`` gives them.
        cut: name or value was longer than NCCL takes.
    """

    number: int
    name: str
    value: str
    cut: bool = False


@dataclass(frozen=True, slots=True)
class ConfFile:
    """A file that NCCL looks for.

    Attributes:
        lines: in order; empty where there is no such file.
        silent: numbers of the lines that are no comment and set nothing, for want of a ``=`` or of a name.
        missing: why it could not be read, if so; None where it was read.
    """

    path: str
    lines: tuple[ConfLine, ...]
    silent: tuple[int, ...] = ()
    missing: str | None = None


def user_path(environ: Mapping[str, str]) -> str | None:
    """The one user file: ``NCCL_CONF_FILE`` (since 2.23) if it is not empty, be it there or not, else ``~/.nccl.conf``."""
    named = environ.get("NCCL_CONF_FILE")
    if named:
        return os.path.abspath(named)
    return f"{environ['HOME']}/.nccl.conf" if "HOME" in environ else None


def user_file(source: NodeSource, environ: Mapping[str, str]) -> ConfFile | None:
    path = user_path(environ)
    return None if path is None else read_file(source, path)


def read_file(source: NodeSource, path: str) -> ConfFile:
    try:
        data = source.path(path).read_bytes()
    except OSError as error:
        return ConfFile(path, (), missing=error.strerror)
    lines, silent = read_lines(data)
    return ConfFile(path, lines, silent)


def read_lines(data: bytes) -> tuple[tuple[ConfLine, ...], tuple[int, ...]]:
    """(lines that set something, numbers of those that should and do not)."""
    found, silent, number = [], [], 1
    for piece in _pieces(data):
        text = piece.partition(b"\0")[0].removesuffix(b"\n").removesuffix(b"\r")
        name, sign, value = text.partition(b"=")
        if not text.startswith(b"#"):
            if sign and name:
                cut = max(len(name), len(value)) > MOST_TEXT or len(piece) == MOST_LINE
                found.append(ConfLine(number, os.fsdecode(name[:MOST_TEXT]), os.fsdecode(value[:MOST_TEXT]), cut))
            elif text.strip():
                silent.append(number)
        number += piece.endswith(b"\n")
    return tuple(found), tuple(silent)


def _pieces(data: bytes) -> list[bytes]:
    """As C's fgets hands them out."""
    lines = io.BytesIO(data)
    return list(iter(lambda: lines.readline(MOST_LINE), b""))
