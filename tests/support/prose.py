"""``make lint``: a docstring opens with a noun phrase or a verb.

    python tests/support/prose.py [FOLDER …]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPENERS = frozenset({"What", "Whether", "Of", "That", "Those", "Who", "Whose", "Which", "Where", "How", "Why", "When", "As",
                     "From", "For", "By", "With", "To"})
LATER = (ROOT / "hpc_mp/train/engine",)  # rewritten with its code


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the first line of each docstring of a module that opens with another word."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split(maxsplit=1)
            if words and words[0].strip('`",:') in OPENERS:
                yield getattr(node, "lineno", 1), " ".join(words).splitlines()[0]


def main() -> int:
    folders = [Path(word) for word in sys.argv[1:]] or [ROOT / "hpc_mp"]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py")) if not any(map(file.is_relative_to, LATER))]
    found = [f"{file.relative_to(Path.cwd())}:{line}: {words}" for file in files for line, words in faults(file)]
    print("\n".join(found) or f"docstrings of {len(files)} files open with a noun or a verb")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
