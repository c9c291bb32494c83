"""Tables of cases that lie beside their tests as TOML."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def table(test: str, file: str, name: str, names: Mapping[str, Any] | None = None) -> Any:
    """Return a table of a file in the folder of a test, whose ``__file__`` comes first: a list of rows, or a dict by case.

    Each test names the file itself, by which ``dependencies.py`` learns of it. A value "$NAME" is that of ``names``, or None.
    """
    return filled(read(Path(test).with_name(file))[name], {"None": None, **(names or {})})


def filled(value: Any, names: Mapping[str, Any]) -> Any:
    """Return a value of a table in which each text "$NAME" is what has this name."""
    if isinstance(value, list):
        return [filled(item, names) for item in value]
    if isinstance(value, dict):
        return {key: filled(item, names) for key, item in value.items()}
    return names.get(value[1:], value) if isinstance(value, str) and value.startswith("$") else value


def swapped(text: str, swaps: Sequence[str]) -> str:
    """Return a text after swaps: an old piece, a new one, and so on."""
    for old, new in zip(swaps[::2], swaps[1::2], strict=True):
        text = text.replace(old, new)
    return text
