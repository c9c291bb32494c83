"""Cache directories named by the hash of their sources: built once, published as a whole, checked before each use."""

import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import read_json, sync, write_json
from hpc_mp.rundir.checkpoints import sha256

SUMS = "SHA256SUMS"  # of every other file, in the format of `sha256sum`; its presence marks a complete directory


def key(*parts: object) -> str:
    """Return a short name for content: 128 bits of the hash of the parts' ``repr``."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def entry(directory: Path, build: Callable[[Path], None], hashed: Callable[[Path], str] = sha256) -> Path:
    """Return ``directory`` with the files that ``build(temporary directory)`` writes. It is built only if no intact one exists.

    Processes may build the same entry at once: the first to finish publishes it, and the others use its result. A damaged entry
    is replaced. There is no lock, because many parallel file systems have none: publishing is one rename. ``hashed``: returns the
    SHA-256 of an existing file. Raises HpcMpError if the cache cannot be written. Errors of ``build`` are passed on.
    """
    if _intact(directory, hashed):
        return directory
    temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        build(temporary)
        _seal(temporary)
        _publish(temporary, directory)
    except OSError as error:
        raise HpcMpError(f"cache {directory.parent}", f"cannot be written ({error.strerror})",
                         "free space there, or set job.directory to a place that can be written") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def _intact(directory: Path, hashed: Callable[[Path], str] = sha256) -> bool:
    try:
        return (directory / SUMS).read_text(encoding="utf-8") == _sums(directory, hashed)
    except (OSError, UnicodeDecodeError):
        return False


def _sums(directory: Path, hashed: Callable[[Path], str] = sha256) -> str:
    files = sorted(path for path in directory.iterdir() if path.name != SUMS)
    return "".join(f"{hashed(path)}  {path.name}\n" for path in files)


def _seal(directory: Path) -> None:
    (directory / SUMS).write_text(_sums(directory), encoding="utf-8")
    for path in (*directory.iterdir(), directory):
        sync(path)


def _publish(temporary: Path, directory: Path) -> None:
    while True:
        try:
            temporary.rename(directory)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if _intact(directory):
                return  # another process was first
            damaged = temporary.with_name(f"{temporary.name}.damaged")
            with suppress(FileNotFoundError):  # another process moved it away
                directory.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        else:
            sync(directory.parent)
            return


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
