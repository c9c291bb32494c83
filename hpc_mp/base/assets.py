"""Data files that a user may read and edit: the shipped ones, and the folders of files that replace them."""

import os
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = _PACKAGE / "_assets"  # in a wheel; a checkout has slurm/, env/ and cyclecloud/ beside the package


def asset(name: str) -> Path:
    """Return the path of a data file or folder, such as ``"slurm/job.sbatch.j2"``. Raises HpcMpError if nothing of that name was
    installed."""
    root = _SHIPPED if _SHIPPED.is_dir() else _PACKAGE.parent
    path = root / name
    if not path.exists():
        raise HpcMpError(f"asset {name}", f"is not installed in {root}", "reinstall hpc-mp")
    return path


@cache
def asset_table(name: str) -> dict[str, Any]:
    """Return the content of a TOML file, such as ``"slurm/versions.toml"``; all callers get the same object. Raises HpcMpError as
    ``asset``."""
    return tomllib.loads(asset(name).read_text(encoding="utf-8"))


SYSTEM = Path("/etc")
FOLDER = "hpc-mp"


def config_folders(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the user's folder and the site's, in order of precedence: ``~/.config/hpc-mp``, ``/etc/hpc-mp``."""
    config = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    return config / FOLDER, SYSTEM / FOLDER


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's folder for facts about clusters: ``$XDG_STATE_HOME/hpc-mp``, by default ``~/.local/state/hpc-mp``."""
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / FOLDER
