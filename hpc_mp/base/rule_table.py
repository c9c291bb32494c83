"""Rules whose words are a table in TOML: ``severity``, ``message`` and ``fix`` by code."""

from collections.abc import Callable, Iterable, Mapping

from hpc_mp.base.assets import asset_table
from hpc_mp.base.findings import Case, Hit, Rule


def rules_of(table: str, finders: Mapping[str, Callable[[Case], Iterable[Hit]]]) -> tuple[Rule[Case], ...]:
    """Return the rules of these codes, in this order. ``table``: the TOML file with their words, such as
    ``"slurm/script-rules.toml"``. Raises KeyError for a code without words."""
    words = asset_table(table)
    return tuple(Rule(code, find=find, **words[code]) for code, find in finders.items())
