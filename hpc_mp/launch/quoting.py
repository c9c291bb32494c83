"""How a value is written so that bash, or sbatch reading its directives, gets exactly that value back."""

from __future__ import annotations

import shlex


class Verbatim(str):
    """Text that goes into a script as it is."""

    __slots__ = ()


def shell(value: object) -> str:
    """One word for bash; ``Verbatim`` text stays as it is."""
    return str(value) if isinstance(value, Verbatim) else shlex.quote(str(value))


def directive(value: object) -> Verbatim:
    """One word for a ``#SBATCH`` line, which bash never reads.

    sbatch has its own rules (``get_argument`` in src/sbatch/opt.c): a backslash escapes even between single quotes,
    and ``#`` outside of quotes ends the line, also inside a word.
    """
    text = str(value)
    if shlex.quote(text) == text:
        return Verbatim(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return Verbatim(f"'{escaped}'")


def literal(path: object) -> str:
    """A path in which Slurm's file name patterns (``%j``) find nothing to replace."""
    return str(path).replace("%", "%%")
