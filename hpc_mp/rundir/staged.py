"""Copies of files on a node's own disk: found by ranks under the whole path of their source, used only when complete.

The copy of ``/disk/me/model`` lies at ``ROOT/disk/me/model``; beside it ``model.staged``, written last, holds
``SIZE NAME`` for every file, each ended by a zero byte. ``slurm/node-start.sh`` writes the same.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

STAGED = "HPC_MP_STAGED"  # the environment variable that names ROOT; unset where nothing is staged

log = logging.getLogger(__name__)


def staging_root(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where this node's copies lie; None when nothing is staged."""
    return Path(environ[STAGED]) if environ.get(STAGED) else None


def staged(path: Path, root: Path | None) -> Path:
    """The complete local copy of an absolute ``path``, else ``path`` itself."""
    if root is None:
        return path
    copy = _copy(path, root)
    return copy if _complete(copy) else path


def stage_directory(source: Path, root: Path) -> Path:
    """Copy ``source`` to the node's own disk unless that is done; returns the copy, links replaced by what they mean.

    Of processes that do so at once, one copies and the others wait. When the disk takes no copy, a warning is logged and
    ``source`` returned.
    """
    copy = _copy(source, root)
    try:
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(_beside(copy, ".lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _complete(copy):
                _publish(source, copy)
    except OSError as error:  # shutil.Error too, which lists the files it could not copy
        log.warning("%s is not staged (%s): it is read where it is", source, error.strerror or error)
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
    """Whether every file is there in the size that the marker says."""
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
