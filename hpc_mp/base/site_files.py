"""Configuration folders of the user and the site. Files in them replace the shipped ones."""

import os
from collections.abc import Mapping
from pathlib import Path

SYSTEM = Path("/etc")
FOLDER = "hpc-mp"


def config_folders(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the user's folder and the site's, in order of precedence: ``~/.config/hpc-mp``, ``/etc/hpc-mp``."""
    config = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    return config / FOLDER, SYSTEM / FOLDER
