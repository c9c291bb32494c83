"""A rendered cluster becomes a directory; one that is there stays as it is."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from hpc_mp.base.errors import HpcMpError


def write(directory: Path, files: Mapping[str, str]) -> None:
    """
    Raises:
        HpcMpError: the directory exists, or cannot be made or filled; then nothing of it is left.
    """
    try:
        directory.mkdir(parents=True)
        _fill(directory, files)
    except FileExistsError:
        raise HpcMpError(f"--output {directory}", "exists", "give another directory, or move this one away") from None
    except OSError as error:
        raise HpcMpError(f"--output {directory}", f"cannot be written ({error.strerror})",
                         "give a directory that does not exist yet, in one that you may write to") from None


def _fill(directory: Path, files: Mapping[str, str]) -> None:
    try:
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)  # half of a cluster would be in the way of the next try
        raise
