"""Cache directories named by the hash of their sources: built once, published as a whole, checked before each use."""

import errno
import hashlib
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import sync
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
