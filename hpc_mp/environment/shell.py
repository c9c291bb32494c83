"""The variables of a machine as lines that bash, dash and every POSIX shell read, under ``set -eu`` too."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from hpc_mp.environment.facts import facts
from hpc_mp.environment.findings import place
from hpc_mp.environment.precedence import Effective
from hpc_mp.environment.view import View

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def shell_lines(view: View) -> Iterator[str]:
    """What is set, and what the profile adds or takes away; any text as it is, bytes as ``os.fsdecode`` gives them.

    Sourced in a container it brings along what the machine's own files say, which are not seen there.
    """
    profile = view.applied.profile if view.applied else None
    yield f"# profile: {profile.name} ({profile.title})" if profile else "# profile: none"
    for script in profile.script if profile else ():
        given = "".join(f"{name}={shlex.quote(value)} " for name, value in script.given.items())
        yield f"# first, in bash: {given}. {shlex.quote(script.files[0])}  ({script.reason})"
    unset = {each.name: each for each in (view.applied.unset if view.applied else ())}
    for each in view.variables:
        if each.origin != "default" and each.name not in unset:
            yield from _export(each, view)
    for name, wanted in sorted(unset.items()):
        yield f"# {one_line(wanted.reason)}"
        yield f"unset {name}"
    for left in view.applied.left_out if view.applied else ():
        yield f"# left out: {left.variable.name} {one_line(left.why)}"


def one_line(text: str) -> str:
    """Text for a comment or a cell of a table: what cannot be printed becomes a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _export(each: Effective, view: View) -> Iterator[str]:
    of_profile = view.applied is not None and any(each.name == known.name for known in view.applied.profile.variable)
    if _NAME.fullmatch(each.name) and (of_profile or each.name.startswith(facts().families)):
        yield f"# {one_line(place(each))}"
        yield f"export {each.name}={shlex.quote(each.value or '')}"
    else:
        yield f"# left out: {one_line(each.name)} ({one_line(place(each))}), not a variable of these libraries"
