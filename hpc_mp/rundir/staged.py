"""Copies of files on a node's local disk. Ranks find a copy by the full path of its source. They use only complete copies.

The copy of ``/disk/me/model`` is at ``ROOT/disk/me/model``. The file ``model.staged`` next to it is written last. It contains
``SIZE NAME`` for every file, each ended by a zero byte. ``slurm/node-start.sh`` writes the same format.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

STAGED = "HPC_MP_STAGED"  # environment variable that names ROOT; unset if nothing is staged

log = logging.getLogger(__name__)


def staging_root(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of this node's copies; None if nothing is staged."""
    return Path(environ[STAGED]) if environ.get(STAGED) else None


def staged(path: Path, root: Path | None) -> Path:
    """Return the complete local copy of an absolute ``path``, else ``path`` itself."""
    if root is None:
        return path
    copy = _copy(path, root)
    return copy if _complete(copy) else path


def stage_directory(source: Path, root: Path) -> Path:
    """Copy ``source`` to the node's local disk unless a copy exists. Return the copy, with links replaced by their targets. Of
    concurrent processes, one copies and the others wait. If the copy fails, log a warning and return ``source``."""
    copy = _copy(source, root)
    try:
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(_beside(copy, ".lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _complete(copy):
                _publish(source, copy)
    except OSError as error:  # also shutil.Error, which lists the files that it could not copy
        log.warning("%s is not staged (%s): it is read from its original path", source, error.strerror or error)
        return source
    return copy


def _publish(source: Path, copy: Path) -> None:
    part = _beside(copy, ".part")
    for left in (part, copy):
        shutil.rmtree(left, ignore_errors=True)
    try:
        shutil.copytree(source, part)
        _beside(copy, ".listed").write_bytes(_listing(part))
        part.rename(copy)
        _beside(copy, ".listed").rename(_beside(copy, ".staged"))
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _complete(copy: Path) -> bool:
    """Return True if every file exists with the size that the marker states."""
    try:
        return sorted(_beside(copy, ".staged").read_bytes().split(b"\0")) == sorted(_listing(copy).split(b"\0"))
    except OSError:
        return False


def _listing(directory: Path) -> bytes:
    files = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    return b"".join(b"%d %s\0" % (file.stat().st_size, os.fsencode(file.relative_to(directory))) for file in files)


def _copy(path: Path, root: Path) -> Path:
    return root / path.relative_to("/")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
