"""Small readable files: JSON documents published atomically, JSON lines read leniently."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError


def text_of(file: Path, kind: str) -> str:
    """Return a user's file with its own line ends. Bytes that are not UTF-8 become visible replacement characters. Raises
    HpcMpError if the file cannot be read, with a remedy that asks for a ``kind`` of file."""
    try:
        return file.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise HpcMpError(str(file), f"cannot be read ({error.strerror})", f"name a {kind}") from None


def sync(path: Path) -> None:
    """Make a file's bytes, or a directory's entries, durable. A full disk may be reported only here. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def render_json(document: Any) -> str:
    """Return a JSON document in the format of the run directory's files."""
    return json.dumps(document, indent=1) + "\n"


def private(path: str, flags: int) -> int:
    """Open a file with ``open(…, opener=private)``: a new file is as private as its directory."""
    return os.open(path, flags, Path(path).parent.stat().st_mode & 0o666)


def owners(path: str, flags: int) -> int:
    """Open a file with ``open(…, opener=owners)``: a new file is accessible only to its owner."""
    return os.open(path, flags, 0o600)


def write_json(path: Path, document: Any) -> None:
    """Publish a JSON document as ``write_text`` publishes text."""
    write_text(path, render_json(document))


def write_text(path: Path, text: str, opener: Callable[[str, int], int] | None = private) -> None:
    """Publish a file atomically and durably (temporary name, fsync, rename). By default it is as private as its directory;
    ``opener`` None: as the umask permits. Raises OSError if the file cannot be written; the old file still exists then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")  # threads may publish it concurrently
    try:
        with open(temporary, "w", encoding="utf-8", opener=opener) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Read a JSON document. Raises OSError or ValueError if it is absent or broken."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all complete records of a JSON-lines file. An absent file counts as empty; an incomplete last line is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    records = []
    for line in data.split(b"\n")[:-1]:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def cut_metrics(path: Path, step: int) -> None:
    """Keep only the records up to ``step``: a resume from there writes the later ones again."""
    if not path.exists():
        return
    records = [record for record in read_lines(path) if record["step"] <= step]
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))
