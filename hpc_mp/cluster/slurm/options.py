"""Options of sbatch that a job file may add: ``slurm.extra`` against the table ``slurm/sbatch-options.toml``."""

from collections.abc import Mapping
from typing import Any, Literal

from hpc_mp.base.assets import asset, asset_table
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.cluster.slurm.option_syntax import TABLE, option_table
from hpc_mp.cluster.slurm.releases import Version, exists, print_version
from hpc_mp.job import AnySpec, ProgramSpec

# The script requests these by default; slurm.extra replaces them, false drops them.
DEFAULTS = ("exclusive", "mem", "cpus-per-task")
Extra = Mapping[str, str | int | bool]


def job_options() -> dict[str, Any]:
    """Return the data of ``slurm/sbatch-options.toml``."""
    return asset_table(TABLE)


def check_options(spec: AnySpec, version: Version | None) -> None:
    """Refuse options that sbatch does not know, that the script sets itself, that contradict each other, or that have no effect.
    Raises HpcMpError, naming the nearest known option, the key to use instead, or the release that has the option."""
    of_scripts = job_options()["of_scripts"] if isinstance(spec, ProgramSpec) and spec.by_script else ()
    _check("slurm.extra", {name: value for name, value in spec.slurm.extra.items() if name not in of_scripts}, version)
    for number, component in enumerate(spec.slurm.components):
        where = f"slurm.components[{number}].extra"
        _check(where, component.extra, version)
        for name in component.extra:
            if name not in job_options()["component"]:
                raise HpcMpError(f"{where}.{name}", "applies to the whole job, not to a component", "move it to slurm.extra")
    if spec.slurm.extra.get("requeue", "expedite") != "expedite":
        raise HpcMpError("slurm.extra.requeue", "is already set by the script", 'leave it out, or write "expedite"')


def options_of(spec: AnySpec, which: Literal["component", "step"]) -> dict[str, str | int | bool]:
    """Return the options in ``slurm.extra`` that each component sets separately, or that srun must get again."""
    return {name: value for name, value in spec.slurm.extra.items() if name in job_options()[which]}


def check_together(options: Mapping[str, str], version: Version | None) -> None:
    """Refuse options of one script that sbatch refuses together, in this release or, if it is unknown, in any. Raises HpcMpError,
    naming them. ``options``: value by name, of the whole job or of one component."""
    for row in option_table()["conflicts"]:
        both = [name for name in row["options"] if _has_option(name, options)]
        if len(both) > 1 and (version is None or exists(row["since"], version)):
            since = f" from {row['since']} on" if row["since"] else ""
            raise HpcMpError(f"the options --{' and --'.join(both)}", f"cannot be combined in sbatch{since}", row["advice"])


def _has_option(name: str, options: Mapping[str, str]) -> bool:
    """Return True if an option is given. ``gres=gpu`` in a table of conflicts matches a value that begins with ``gpu``."""
    option, _, value = name.partition("=")
    return option in options and any(part.startswith(value) for part in options[option].split(","))


def _check(where: str, extra: Extra, version: Version | None) -> None:
    table = job_options()
    options, refused = table["options"], table["refused"]
    for name, value in extra.items():
        key = f"{where}.{name}"
        if name in refused:
            rule, remedy = refused[name]
            raise HpcMpError(key, rule, remedy)
        if name not in options:
            hint = did_you_mean(name, [*options, *refused])
            raise HpcMpError(key, "is not an option of sbatch",
                             f"{hint} Add an option of your site's plug-ins to {asset(TABLE)}".lstrip())
        if value is False and name not in DEFAULTS:
            raise HpcMpError(f"{key} = false", "has no meaning for sbatch", "write true, or leave it out")
        if version and not exists(options[name], version):
            bound = f"before Slurm {options[name][1:]}" if options[name][0] == "-" else f"from Slurm {options[name]} on"
            raise HpcMpError(key, f"exists {bound}; this cluster runs {print_version(version)}", "leave it out")
    for group in table["dropped"]:
        both = [name for name in group["options"] if extra.get(name, False) is not False]
        if len(both) > 1:
            raise HpcMpError(f"{where}: {' and '.join(both)}", "contradict each other: sbatch silently drops one",
                             "keep one of them")
