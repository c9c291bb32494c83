"""Rows of a text file whose cells are divided by ``|``; lines that begin with ``#`` are comments."""

from __future__ import annotations

from pathlib import Path


def rows(path: Path, cells: int) -> list[tuple[str, ...]]:
    """The last cell holds the rest of its line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [tuple(map(str.strip, line.split("|", cells - 1))) for line in lines if not line.startswith("#")]
