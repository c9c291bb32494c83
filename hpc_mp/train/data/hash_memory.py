"""Remembered hashes of large files: a corpus of terabytes and its tokens are hashed once, not at every start."""

import os
import time
from contextlib import suppress
from pathlib import Path

from hpc_mp.rundir import read_json, write_json
from hpc_mp.rundir.checkpoints import sha256

FILE = "hashes.json"  # in the cache: absolute path -> [bytes, nanoseconds of the last change, inode, SHA-256]
SETTLED_NS = 2_000_000_000  # a file that was just written may be written again within one clock tick, unnoticed


class HashMemory:
    """SHA-256 of files, remembered as long as size, inode and modification time are unchanged. ``cache``: the directory that
    keeps the hashes, beside what is made from the files. If it cannot be written, nothing is remembered."""

    def __init__(self, cache: Path) -> None:
        self._file = cache / FILE
        self._known: dict[str, list[int | str]] = {}
        with suppress(OSError, ValueError):
            tree = read_json(self._file)
            self._known = tree if isinstance(tree, dict) else {}
        self._new = False

    def __call__(self, path: Path) -> str:
        """Return the SHA-256 of a file in hexadecimal. Raises OSError."""
        if stored := self.remembered(path):
            return stored
        status = os.stat(path)
        digest = sha256(path)
        if time.time_ns() - status.st_mtime_ns > SETTLED_NS:
            self._known[os.path.abspath(path)], self._new = [*_mark(status), digest], True
        return digest

    def remembered(self, path: Path) -> str | None:
        """Return the hash without reading the file; None if the file would have to be read. Raises OSError."""
        entry = self._known.get(os.path.abspath(path))
        return str(entry[-1]) if isinstance(entry, list) and entry[:-1] == _mark(os.stat(path)) else None

    def keep(self) -> None:
        """Write new hashes to the cache."""
        if self._new:
            with suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._file, {name: mark for name, mark in self._known.items() if os.path.exists(name)})
            self._new = False


def _mark(status: os.stat_result) -> list[int]:
    """Return the properties that change with a file's content."""
    return [status.st_size, status.st_mtime_ns, status.st_ino]
