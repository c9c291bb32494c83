"""Quoting of values, so that bash, or sbatch reading its directives, gets exactly that value back."""

import shlex


class Verbatim(str):
    """Text that is inserted into a script unchanged."""

    __slots__ = ()


def shell(value: object) -> str:
    """Return one word for bash; ``Verbatim`` text is unchanged."""
    return str(value) if isinstance(value, Verbatim) else shlex.quote(str(value))


def directive(value: object) -> Verbatim:
    """Return one word for a ``#SBATCH`` line, which bash never reads. sbatch has its own rules (``get_argument`` in
    src/sbatch/opt.c): a backslash escapes even between single quotes, and ``#`` outside of quotes ends the line, also inside a
    word."""
    text = str(value)
    if shlex.quote(text) == text:
        return Verbatim(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return Verbatim(f"'{escaped}'")


def literal(path: object) -> str:
    """Return a path with Slurm's file name patterns (``%j``) escaped."""
    return str(path).replace("%", "%%")
