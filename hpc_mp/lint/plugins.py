"""Linters of other distributions: each registers a function for a kind of file under the entry points ``hpc_mp.linters``."""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import Finding


def cyclecloud_linter(kind: str) -> Callable[..., Sequence[Finding]]:
    """Return the function that lints a ``"template"`` or a ``"project"`` of CycleCloud. Raises HpcMpError if cyclecloud-lint is
    not installed."""
    for plugin in entry_points(group="hpc_mp.linters", name=kind):
        linter: Callable[..., Sequence[Finding]] = plugin.load()
        return linter
    raise HpcMpError(f"CycleCloud {kind}", "is linted by cyclecloud-lint, a package of its own that is not installed",
                     "install it with: pip install cyclecloud-lint")
