"""NCCL's configuration files, read as NCCL reads them (``setEnvFile`` and ``initEnvFunc`` in its src/misc/param.cc, 2.30.7), and
its parsing of values.

Lines are raw ``NAME=VALUE``: text around the sign, including quotes and blanks, belongs to name and value. A ``#`` starts a
comment only in the first column. A variable is never set twice, so the first of two lines wins, and a variable set by the
process, even to an empty value, hides every line.

Numbers are parsed as by ``strtoll`` with base 0 (``ncclLoadParam`` in its src/misc/param.cc), lists by NCCL's own rules
(``parseStringList``, ``matchIfList`` in its src/misc/utils.cc).
"""

import io
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hpc_mp.cluster.node.source import NodeSource

SYSTEM = "/etc/nccl.conf"
MOST_LINE = 4095  # bytes that NCCL reads at a time: the rest of a longer line becomes a separate line
MOST_TEXT = 1023  # maximum bytes of a name and of a value


class Setting(NamedTuple):
    """A variable that is set outside of a script. Bytes of NCCL's files that are not UTF-8 are as by ``os.fsdecode``."""

    name: str
    value: str
    line: int = 0  # the number of the line in the file, from 1


@dataclass(frozen=True, slots=True)
class ConfFile:
    """A file that NCCL looks for."""

    path: str
    lines: tuple[Setting, ...]  # the lines in order; empty if the file does not exist
    missing: str | None = None  # the reason why the file could not be read; None if it was read


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
    return ConfFile(path, read_lines(data))


def read_lines(data: bytes) -> tuple[Setting, ...]:
    """Return the lines that set a variable."""
    lines, number = [], 1
    for piece in _pieces(data):
        text = piece.partition(b"\0")[0].removesuffix(b"\n").removesuffix(b"\r")
        name, sign, value = text.partition(b"=")
        if sign and name and not text.startswith(b"#"):
            lines.append(Setting(os.fsdecode(name[:MOST_TEXT]), os.fsdecode(value[:MOST_TEXT]), number))
        number += piece.endswith(b"\n")
    return tuple(lines)


def _pieces(data: bytes) -> list[bytes]:
    """Split data into pieces as C's fgets does."""
    lines = io.BytesIO(data)
    return list(iter(lambda: lines.readline(MOST_LINE), b""))


_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]+|[0-9]+)")
_PLAIN = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0|[1-9][0-9]*)")
LEAST, MOST = -(2**63), 2**63 - 1


def is_plain(text: str) -> bool:
    """Return True if text is a 64-bit integer that a person reads the same way: no leading zero, no other text."""
    return bool(_PLAIN.fullmatch(text)) and read_number(text) is not None


def read_number(text: str) -> int | None:
    """Return NCCL's reading of non-empty text; None if NCCL uses the default because the number has more than 64 bits. ``"fast"``
    is 0, ``"4 # more"`` is 4, ``"022"`` is 18: unreadable text ends the number and is ignored."""
    match = _NUMBER.match(text)
    if not match:
        return 0
    digits = match[2]
    if digits[:2].lower() == "0x":
        value = int(digits, 16)
    elif digits[0] == "0":
        value = int(re.match("[0-7]+", digits)[0], 8)  # type: ignore[index]
    else:
        value = int(digits)
    value = -value if match[1] == "-" else value
    return value if LEAST <= value <= MOST else None


def taken(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the ``names`` that ``[^][=]name[:port…],name…`` selects: ``^`` inverts, ``=`` matches whole names, not prefixes. An
    empty list selects everything; after ``^``, nothing."""
    others = pattern.startswith("^")
    entries = pattern.removeprefix("^")
    exact = entries.startswith("=")
    selectors = [name for entry in entries.removeprefix("=").split(",") if (name := entry.partition(":")[0])]

    def listed(name: str) -> bool:
        return not selectors or any(name == selector if exact else name.startswith(selector) for selector in selectors)

    return [name for name in names if listed(name) != others]
