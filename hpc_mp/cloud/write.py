"""A rendered cluster becomes a directory; one that is there stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpc_mp.errors import HpcMpError


def write(directory: Path, files: Mapping[str, str]) -> None:
    """
    Raises:
        HpcMpError: the directory exists, or cannot be made.
    """
    try:
        directory.mkdir(parents=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise HpcMpError(f"--output {directory}", "exists", "give another directory, or move this one away") from None
    except OSError as error:
        raise HpcMpError(f"--output {directory}", f"cannot be written ({error.strerror})",
                         "give a directory that does not exist yet, in one that you may write to") from None
