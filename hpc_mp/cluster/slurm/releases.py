"""Differences between Slurm's releases that matter for a job script: the table ``slurm/versions.toml``."""

import re
from functools import cache

from hpc_mp.base.assets import asset_table
from hpc_mp.base.errors import HpcMpError

TABLE = "slurm/versions.toml"
Version = tuple[int, int]  # (23, 11) for Slurm 23.11


def parse_version(text: str) -> Version:
    """Parse ``23.11`` or ``23.11.4`` to (23, 11). Raises HpcMpError if it is not a release of Slurm."""
    match = re.fullmatch(r"(\d\d)\.(\d\d?)(\.\d+)?", text)
    if not match:
        raise HpcMpError(f"Slurm version {text}", "must have the form YEAR.MONTH", "write for example 23.11")
    return int(match[1]), int(match[2])


def print_version(version: Version) -> str:
    """Format (23, 2) as ``23.02``."""
    return f"{version[0]}.{version[1]:02d}"


def exists(releases: str, version: Version) -> bool:
    """Return True if ``releases`` includes ``version``. ``""``: all releases; ``"24.05"``: that and later ones; ``"-24.05"``:
    those before it; ``"23.02-24.05"``: both."""
    since, _, until = releases.partition("-")
    return (not since or parse_version(since) <= version) and (not until or version < parse_version(until))


@cache
def releases() -> tuple[Version, ...]:
    """Return the releases that scripts are checked against, the earliest first."""
    return tuple(map(parse_version, asset_table(TABLE)["releases"]))


def differences(version: Version | None) -> dict[str, str]:
    """Return the differences of a release: their names, and the consequence of each for a script. For None, an unknown release:
    those that hold or may hold in any."""
    return {row["name"]: row["why"] for row in asset_table(TABLE)["difference"] if _holds(row, version)}


def _holds(row: dict[str, str | bool], version: Version | None) -> bool:
    if version is None:
        return bool(row.get("unknown"))
    since, until = (str(row.get(key, "")) for key in ("since", "until"))
    return since != "unknown" and exists(f"{since}-{until}", version)
