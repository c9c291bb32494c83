"""Which options of sbatch a job file may add: ``slurm.extra`` against the table ``slurm/sbatch-options.toml``."""

from __future__ import annotations

import difflib
import tomllib

from hpc_mp.assets import asset
from hpc_mp.errors import HpcMpError
from hpc_mp.job import JobSpec

TABLE = "slurm/sbatch-options.toml"
DEFAULTS = ("exclusive", "mem")  # the script asks for these by itself; slurm.extra replaces them, false drops them


def check_options(spec: JobSpec, slurm_version: tuple[int, int] | None) -> None:
    """Refuse what sbatch does not know, what the script settles itself, and what says nothing.

    Raises:
        HpcMpError: naming the nearest known option, the key to use instead, or the release that has the option.
    """
    table = tomllib.loads(asset(TABLE).read_text(encoding="utf-8"))
    options, refused = table["options"], table["refused"]
    for name, value in spec.slurm.extra.items():
        given = f"slurm.extra.{name}"
        if name in refused:
            rule, remedy = refused[name]
            raise HpcMpError(given, rule, remedy)
        if name not in options:
            near = difflib.get_close_matches(name, [*options, *refused], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise HpcMpError(given, "is not an option of sbatch",
                             f"{hint}One that your site's plug-ins add goes into {asset(TABLE)}")
        if value is False and name not in DEFAULTS:
            raise HpcMpError(f"{given} = false", "says nothing to sbatch", "write true, or leave it out")
        if slurm_version and options[name] and slurm_version < _release(options[name]):
            here = f"{slurm_version[0]}.{slurm_version[1]:02d}"
            raise HpcMpError(given, f"exists from Slurm {options[name]} on; this cluster runs {here}", "leave it out")


def _release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)

