"""``make lint``: a docstring opens with a noun phrase or a verb, and an identifier is a noun of the domain.

    python tests/support/prose.py [FOLDER …]
"""

import ast
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hpc_mp", "cyclecloud/lint/cyclecloud_lint", "slurm/lab/hpc_mp_lab")
OPENERS = frozenset({"What", "Whether", "Of", "That", "Those", "Who", "Whose", "Which", "Where", "How", "Why", "When", "As",
                     "From", "For", "By", "With", "To"})
VAGUE = frozenset({"found", "each", "said", "known", "given", "seen", "asked", "told", "made", "wanted", "kept", "most", "here",
                   "there", "this", "those", "whose", "it", "put", "got"})
# Fields of files that others write.
FIELDS = {("environment/profiles.py", "given"), ("planner/fabrics.py", "most"), ("rundir/plan.py", "here")}


@lru_cache(maxsize=1)
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the first line of each docstring of a module that opens with another word."""
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split(maxsplit=1)
            if words and words[0].strip('`",:') in OPENERS:
                yield getattr(node, "lineno", 1), " ".join(words).splitlines()[0]


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable and parameter of a module that could name anything."""
    for node in nodes(path):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        if name in VAGUE and not any(name == field and str(path).endswith(file) for file, field in FIELDS):
            yield node.lineno, name


def main() -> int:
    folders = [Path(word).resolve() for word in sys.argv[1:]] or [ROOT / package for package in PACKAGES]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    faults = [f"{file.relative_to(ROOT)}:{line}: {text}" for file in files for line, text in
              (*docstrings(file), *identifiers(file))]
    print("\n".join(faults) or f"{len(files)} files: docstrings open with a noun or a verb, identifiers are nouns")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
