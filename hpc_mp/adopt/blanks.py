"""Placeholders in ``< >`` or ``{{ }}`` that the user must fill in. bash would read them as redirections, sbatch as words.

The module is separate so that the code that reads statements need not know of placeholders. They are rewritten with letters
that occur in no script, so that each is a word or a part of one, and restored at the end.
"""

from __future__ import annotations

import re
from typing import Any

BLANK = "\ue000"
_LETTERS = str.maketrans("< >", f"{BLANK}\ue001\ue002")
_AS_IT_WAS = str.maketrans(f"{BLANK}\ue001\ue002", "< >")
_TEMPLATE = re.compile(r"\{\{[^{}\n]*\}\}")
_BLANK = re.compile(r"(?<![<0-9&])<(?! )([A-Za-z][^<>\n|;&()$]*)(?<! )>(?!>)")
_NO_FILE = re.compile(r"[\s=]<[A-Za-z][\w ./-]*>(\s+-|\.\w)")
_QUOTED = re.compile(r"(\"(?:\\.|[^\"\\])*\"|'[^']*')")


def obvious(text: str) -> bool:
    """Return True if a placeholder is in a place where bash would see a redirection: ``--cores <cores> --fast``."""
    return any(_NO_FILE.search(_QUOTED.sub("x", line)) for line in text.split("\n") if not line.lstrip().startswith("#"))


def marked(text: str, *, directives: bool = False) -> str:
    """Rewrite every placeholder as a word, in the directives or else in the statements. Comments and quotes are unchanged."""
    lines = text.split("\n")
    if directives:
        return "\n".join(_TEMPLATE.sub(_word, _BLANK.sub(_word, line)) if line.startswith("#SBATCH") else line for line in lines)
    return "\n".join(line if line.lstrip().startswith("#") else "".join(
        part if number % 2 else _BLANK.sub(_word, part) for number, part in enumerate(_QUOTED.split(line))) for line in lines)


def _word(found: re.Match[str]) -> str:
    return found[0].translate(_LETTERS)


def restored(value: Any) -> Any:
    """Undo ``marked`` in a string, or in all strings of a tree of tables and lists."""
    if isinstance(value, str):
        return value.translate(_AS_IT_WAS)
    if isinstance(value, dict):
        return {name: restored(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(restored, value))
    return value
