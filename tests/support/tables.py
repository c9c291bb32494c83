"""Tables of cases that lie beside their tests as TOML."""

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def table(test: str, file: str, name: str) -> Any:
    """Return a table of a file in the folder of a test, whose ``__file__`` comes first: a list of rows, or a dict by case.

    Each test names the file itself, by which ``dependencies.py`` learns of it.
    """
    return read(Path(test).with_name(file))[name]


def swapped(text: str, swaps: Sequence[str]) -> str:
    """Return a text after swaps: an old piece, a new one, and so on."""
    for old, new in zip(swaps[::2], swaps[1::2], strict=True):
        text = text.replace(old, new)
    return text
