"""Folders of the user and the site: configuration, whose files replace the shipped ones; and what is known about clusters."""

import os
from collections.abc import Mapping
from pathlib import Path

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
