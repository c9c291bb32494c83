"""A directory that appears whole or not at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import sync


def check_output(output: Path, force: bool) -> None:
    """May a model directory be put at ``output``? With ``force`` also where one is.

    Raises:
        HpcMpError: something is there that must not be replaced.
    """
    value = f"--output {output}"
    try:
        entries = list(output.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise HpcMpError(value, "is a file, or lies below one", "name a directory") from None
    except OSError as error:
        raise HpcMpError(value, f"cannot be read ({error.strerror})", "name another directory") from None
    if entries and not force:
        raise HpcMpError(value, "is not empty", "name another directory, or add --force to replace a model there")
    if entries and (any(entry.is_dir() for entry in entries) or not (output / "config.json").exists()):
        raise HpcMpError(value, "is no model directory (a config.json and other files, no directories), and --force "
                         "replaces nothing else", "name another directory")


@contextmanager
def publishing(output: Path) -> Iterator[Path]:
    """A temporary directory beside ``output`` that takes its place when the block ends well; else nothing is left.

    Raises:
        HpcMpError: it cannot be written (full disk, exceeded quota, no permission …).
    """
    made = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
    old = made.with_name(f"{made.name}.old")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        made.mkdir()
        yield made
        for path in (*made.iterdir(), made):
            sync(path)
        if output.exists():
            output.rename(old)
        made.rename(output)
        sync(output.parent)
    except (OSError, SafetensorError) as error:
        if old.exists() and not output.exists():
            old.rename(output)
        reason = getattr(error, "strerror", None) or str(error)
        raise HpcMpError(f"--output {output}", f"cannot be written ({reason})",
                         "name a directory that you may write to, on a file system with enough room") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
