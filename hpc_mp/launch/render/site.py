"""Replacements by a site or a project: the template of the job script, and default values for job files.

Both are in a folder ``hpc-mp``: beside the job file, else in the user's configuration (``~/.config/hpc-mp``), else in ``/etc``.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.base.assets import FOLDER, asset, config_folders
from hpc_mp.base.errors import HpcMpError

TEMPLATE, DEFAULTS = "job.sbatch.j2", "site.toml"
SECTIONS = ("slurm", "environment")  # of the job file: those that a site may set


@dataclass(frozen=True, slots=True)
class ScriptTemplate:
    path: Path
    text: str


def shipped() -> ScriptTemplate:
    """Return the shipped template, ``slurm/job.sbatch.j2``."""
    return _read(asset(f"slurm/{TEMPLATE}"))


def find_template(project: Path, environ: Mapping[str, str] = os.environ) -> ScriptTemplate:
    """Return the template for job files in the directory ``project``. Raises HpcMpError if it cannot be read."""
    template = _find(TEMPLATE, project, environ)
    return _read(template) if template else shipped()


def site_defaults(project: Path, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the parsed tables of ``site.toml``, the defaults for job files; empty without the file. Raises HpcMpError if it
    cannot be read, or sets keys that a site may not set."""
    path = _find(DEFAULTS, project, environ)
    if path is None:
        return {}
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HpcMpError(f"site file {path}", f"cannot be read ({error})", "mend or remove it") from None
    for name, table in tree.items():
        if name not in SECTIONS or not isinstance(table, dict):
            raise HpcMpError(f"{name} in {path}", "is not a site's to decide",
                             f"write keys of {' and '.join(f'[{section}]' for section in SECTIONS)} only")
    return tree


def _find(name: str, project: Path, environ: Mapping[str, str]) -> Path | None:
    paths = (folder / name for folder in (project / FOLDER, *config_folders(environ)))
    return next((path for path in paths if path.is_file()), None)


def _read(path: Path) -> ScriptTemplate:
    try:
        return ScriptTemplate(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise HpcMpError(f"template {path}", f"cannot be read ({error})", "mend or remove it") from None
