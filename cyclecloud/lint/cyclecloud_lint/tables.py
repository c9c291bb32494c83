"""Tables of this package: words of the rules, and names that templates use."""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cyclecloud_lint.case import Case
from hpc_mp.base.findings import Hit, Rule


@cache
def table(name: str) -> dict[str, Any]:
    """Return the content of a TOML file of the package; all callers get the same object."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def rules_of(finders: Mapping[str, Callable[[Case], Iterable[Hit]]]) -> tuple[Rule[Case], ...]:
    """Return the rules of these codes, in this order. Raises KeyError for a code without words in ``template-rules.toml``."""
    words = table("template-rules.toml")
    return tuple(Rule(code, find=find, **words[code]) for code, find in finders.items())
