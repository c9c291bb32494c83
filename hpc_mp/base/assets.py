"""Shipped data files that a user may read and edit: templates, environment profiles, the CycleCloud project."""

import tomllib
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
