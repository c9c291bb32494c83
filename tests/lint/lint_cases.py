"""The planted faults of the linter's rules, those of ``tests/golden/lint/planted.toml``."""

import tomllib
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden"
_PLANTED = tomllib.loads((GOLDEN / "lint" / "planted.toml").read_text(encoding="utf-8"))
HEAD: str = _PLANTED["head"]
CASES: list[dict[str, Any]] = _PLANTED["case"]


def placed(text: str) -> tuple[str, int]:
    """Return the whole script, and the number of lines above the text of a case."""
    whole = text.lstrip("\n").startswith("#!") or "\r" in text
    return (text, 0) if whole else (HEAD + text, HEAD.count("\n"))
