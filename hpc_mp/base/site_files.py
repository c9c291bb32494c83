"""Where a user and a site keep files of their own that stand in place of what is shipped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SYSTEM = Path("/etc")
FOLDER = "hpc-mp"


def config_folders(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """The user's folder and the site's, in the order in which they count: ``~/.config/hpc-mp``, ``/etc/hpc-mp``."""
    config = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    return config / FOLDER, SYSTEM / FOLDER
