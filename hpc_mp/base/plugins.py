"""Parts of hpc-mp that are distributions of their own, found by the entry points that they register."""

from typing import Any

from hpc_mp.base.errors import HpcMpError

# Group of entry points, without ``hpc_mp.``: the value of the error about a name, and the distribution to install.
GROUPS = {"commands": ("hpc-mp {}", "hpc-mp-lab"), "linters": ("CycleCloud {}", "cyclecloud-lint")}


def plugin(group: str, name: str) -> Any:
    """Return the object of an entry point, such as ``"linters", "template"``. Raises HpcMpError if its distribution is not
    installed."""
    from importlib.metadata import entry_points  # here: its import and its search take longer than a light verb does

    for point in entry_points(group=f"hpc_mp.{group}", name=name):
        return point.load()
    value, distribution = GROUPS[group]
    raise HpcMpError(value.format(name), f"needs {distribution}, a package of its own that is not installed",
                     f"install it with: pip install {distribution}")
