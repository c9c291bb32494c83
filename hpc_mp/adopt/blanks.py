"""Names in ``< >`` or ``{{ }}`` that a script leaves to be filled in, which bash would take for redirections, sbatch for words.

A file of its own, for whoever reads the statements must not know of it: such a name is written with letters that no script
has, so that it is a word or a part of one, and as it was again once everything is said.
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
    """Whether a name is to be filled in where bash would read: ``--cores <cores> --fast`` writes into no file ``--fast``."""
    return any(_NO_FILE.search(_QUOTED.sub("x", line)) for line in text.split("\n") if not line.lstrip().startswith("#"))


def marked(text: str, *, directives: bool = False) -> str:
    """The text with every such name as a word, in its directives or else in its statements; comments and quotes stay."""
    lines = text.split("\n")
    if directives:
        return "\n".join(_TEMPLATE.sub(_word, _BLANK.sub(_word, line)) if line.startswith("#SBATCH") else line for line in lines)
    return "\n".join(line if line.lstrip().startswith("#") else "".join(
        part if number % 2 else _BLANK.sub(_word, part) for number, part in enumerate(_QUOTED.split(line))) for line in lines)


def _word(found: re.Match[str]) -> str:
    return found[0].translate(_LETTERS)


def restored(value: Any) -> Any:
    """What ``marked`` has written, as it was, in a text, or in all texts of a tree of tables and lists."""
    if isinstance(value, str):
        return value.translate(_AS_IT_WAS)
    if isinstance(value, dict):
        return {name: restored(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(restored, value))
    return value
